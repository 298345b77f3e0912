"""From settings and a data set to the batches that this process reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from stampede.data import DataError, Dataset, GlobalBatches, Order, Part
from stampede.data.prepared.reader import ShardedPart
from stampede.data.residence import Readahead, choose_residence, make_order, place
from stampede.engine.config import Config
from stampede.engine.config.data import ReadingSection
from stampede.engine.errors import RunFolderError
from stampede.engine.processes import Processes
from stampede.settings import SettingsError

# Batches that wait in page-locked memory for a GPU, or while the disk is busy.
_AHEAD = 2

# Keys that the order of the training rows depends on and that a resumed run may change.
_ORDERING = ("shuffle", "memory_gb")

# Rows whose weights are looked at together.
_PIECE = 1 << 20


class Reader:
    """Opens the parts of a data set for training and evaluation, as this rank of a run.

    To be made when model and optimizers have their memory: what is free on a GPU then decides
    whether `data.residence: auto` puts the data there.

    Args:
        config: a whole job.
        dataset: as opened.
        processes: this process among all.

    Attributes:
        dataset: where `data.residence` wants it.
        residence: `disk`, `memory` or `device`.

    Raises:
        SettingsError: the data do not fit on the device.
        DataError: a part to evaluate has no weight.
    """

    def __init__(self, config: Config, dataset: Dataset, processes: Processes) -> None:
        section = _section(config)
        for name, part in (("validation", dataset.validation), ("test", dataset.test)):
            if part is not None:
                _check_weighted(name, part)
        self._processes = processes
        self._section = section
        self._memory = section.memory_gb * 1e9
        self._seed = config.run.seed
        # Of the data as opened, so that it does not depend on where they are.
        self._order = training_order(config, dataset)
        self._train_batch_size = config.train.batch_size
        self._evaluate_batch_size = config.evaluate.batch_size
        self._fields = list(dataset.vocabulary_sizes)
        self.residence = choose_residence(
            section.residence, dataset, self._memory, processes.device
        )
        try:
            self.dataset = place(dataset, self.residence, processes.device)
        except torch.OutOfMemoryError:
            raise SettingsError(
                "data.residence: found 'device', but the data do not fit into the free memory of "
                f"{processes.device}; write data.residence=memory or disk"
            ) from None

    def training(self) -> GlobalBatches:
        """Batches of the training part, in a new order each epoch."""
        return self._batches(self.dataset.train, self._order, self._train_batch_size)

    def state_dict(self, batches: GlobalBatches) -> dict[str, Any]:
        """State of the batches for training, and the settings that their order depends on."""
        return {**batches.state_dict(), "settings": _settings(self._section)}

    def load_state_dict(self, batches: GlobalBatches, state: Mapping[str, Any]) -> None:
        """Go on with the batches for training where the state was taken.

        Raises:
            RunFolderError: settings or data are such that the rows come in another order.
            DataError: it is no state of these batches.
        """
        settings, order = state.get("settings"), state.get("order")
        if settings and order and Order(**order).deciding() != self._order.deciding():
            now = {key: getattr(self._section, key) for key in settings}
            raise RunFolderError(
                f"with {_written(now)} the training rows come in another order than in the run so "
                f"far; write {_written(settings)} as in the checkpoint and use the same data, or "
                "choose another run.name"
            )
        batches.load_state_dict(state)

    def evaluation(self, part: Part) -> GlobalBatches:
        """Batches of a part of `dataset` in the order of its rows."""
        order = make_order(part, "none", self._memory, self._seed)
        return self._batches(part, order, self._evaluate_batch_size)

    def _batches(self, part: Part, order: Order, batch_size: int) -> GlobalBatches:
        from_disk = self.residence == "disk" and isinstance(part, ShardedPart)
        on_gpu = self._processes.device.type == "cuda"
        copied = on_gpu and part.device.type == "cpu"
        return GlobalBatches(
            part,
            self._fields,
            batch_size,
            self._processes.rank,
            self._processes.world_size,
            order,
            # Without a GPU training keeps all cores busy, and a thread would only take from it.
            ahead=_AHEAD if copied or from_disk else 0,
            pin=self._processes.device if copied else None,
            before_reading=Readahead(part, order) if from_disk else None,
            unknown_rows=self.dataset.unknown_rows,
        )


def training_order(config: Config, dataset: Dataset) -> Order:
    """The order of the training rows.

    Args:
        dataset: as opened.
    """
    section = _section(config)
    shuffle = section.shuffle if dataset.shuffle else "none"
    return make_order(dataset.train, shuffle, section.memory_gb * 1e9, config.run.seed)


def _section(config: Config) -> ReadingSection:
    """Data without files have no keys for reading."""
    return config.data if isinstance(config.data, ReadingSection) else ReadingSection()


def _settings(section: ReadingSection) -> dict[str, Any]:
    return {key: getattr(section, key) for key in _ORDERING}


def _written(settings: Mapping[str, Any]) -> str:
    """Settings as they stand on a command line."""
    return " ".join(f"data.{key}={value}" for key, value in settings.items())


def _check_weighted(name: str, part: Part) -> None:
    """Refuse a part without any weight before it is trained for; mostly one look is enough."""
    for start in range(0, part.rows, _PIECE):
        rows = torch.arange(start, min(start + _PIECE, part.rows), device=part.device)
        weights = part.weight(rows)
        if weights is None or bool(weights.any()):
            return
    raise DataError(
        f"all {part.rows:,} samples of the {name} part have the weight 0, so that it has no "
        "logloss; give some a weight above 0, or split the data otherwise"
    )
