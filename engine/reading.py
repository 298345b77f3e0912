"""From settings and a data set to the batches that this process reads."""

from __future__ import annotations

import torch

from stampede.data import Dataset, GlobalBatches, Order, Part
from stampede.data.prepared.part import ShardedPart
from stampede.data.residence import Readahead, choose_residence, make_order, place
from stampede.engine.config import Config
from stampede.engine.config.reading import ReadingSection
from stampede.engine.processes import Processes
from stampede.settings import SettingsError

# Batches that wait in page-locked memory for a GPU, or while the disk is busy.
_AHEAD = 2


class Reader:
    """Opens the parts of a data set for training and evaluation, as this rank of a run.

    To be made when model and optimizers have their memory: what is free on a GPU then decides
    whether `data.residence: auto` puts the data there.

    Args:
        config: a whole job; data without files have no keys for reading.
        dataset: as opened.
        processes: this process among all.

    Attributes:
        dataset: where `data.residence` wants it.
        residence: `disk`, `memory` or `device`.

    Raises:
        SettingsError: the data do not fit on the device.
    """

    def __init__(self, config: Config, dataset: Dataset, processes: Processes) -> None:
        section = config.data if isinstance(config.data, ReadingSection) else ReadingSection()
        self._processes = processes
        self._shuffle = section.shuffle if dataset.shuffle else "none"
        self._memory = section.memory_gb * 1e9
        self._seed = config.run.seed
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
        part = self.dataset.train
        order = make_order(part, self._shuffle, self._memory, self._seed)
        return self._batches(part, order, self._train_batch_size)

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
        )
