"""A run that goes on although it was changed: what of its place in training is still meant."""

from __future__ import annotations

from dataclasses import replace

from stampede.data import Dataset, Order
from stampede.engine.checkpoint import Progress
from stampede.engine.config import Config
from stampede.engine.reading import start_of_epoch, training_order


def forced_progress(
    progress: Progress, config: Config, dataset: Dataset
) -> tuple[Progress, list[str]]:
    """Where a changed run goes on: at the same step; and what is not as it was, line by line.

    The best epoch so far is forgotten, since its checkpoint is not of this network and data. Where
    the training rows are others or come in another order, or amid an epoch in batches of another
    size, the epoch begins again.
    """
    lines = []
    if progress.best_epoch:
        lines.append(
            f"epoch {progress.best_epoch} is no longer the best: the best is chosen among those to "
            "come"
        )
    reader = progress.reader
    if not _is_meant(progress, config, dataset):
        epoch = reader.get("epoch", progress.epoch)
        if reader.get("samples"):
            lines.append(
                f"epoch {epoch + 1} begins again with its first sample: the "
                f"{reader['samples']:,} samples it had were of other data, or in another order or "
                "other batches"
            )
        reader = start_of_epoch(config, dataset, epoch)
    forgotten = {
        "best_epoch": 0,
        "best_score": None,
        "best_auc": None,
        "selected": {},
        "waited": 0,
        # Those to come are not compared with losses of another configuration.
        "logged_losses": [],
    }
    return replace(progress, reader=reader, **forgotten), lines


def _is_meant(progress: Progress, config: Config, dataset: Dataset) -> bool:
    """Whether the position in the epoch is one of these batches."""
    reader = progress.reader
    order = reader.get("order")
    if order is None or Order(**order).deciding() != training_order(config, dataset).deciding():
        return False
    return not reader.get("samples") or reader.get("batch_size") == config.train.batch_size
