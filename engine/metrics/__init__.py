"""Metrics of predicted clicks: exact, streaming, within a memory budget."""

from stampede.engine.metrics.arrays import auc, average_precision, gauc, logloss
from stampede.engine.metrics.part_metrics import Metric, PartMetrics

__all__ = ["Metric", "PartMetrics", "auc", "average_precision", "gauc", "logloss"]
