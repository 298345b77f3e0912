"""Metrics of predicted clicks: exact, of samples that come in piece by piece."""

from stampede.engine.metrics.arrays import auc, average_precision, gauc, logloss
from stampede.engine.metrics.part_metrics import Metric, PartMetrics

__all__ = ["Metric", "PartMetrics", "auc", "average_precision", "gauc", "logloss"]
