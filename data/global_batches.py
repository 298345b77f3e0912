"""Global batches of a part: the same samples in batch k on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from stampede.data.batch import Batch
from stampede.data.samples import Part


class GlobalBatches:
    """One rank's view of a part's global batches.

    Every rank gets the same number of samples in every batch: the last global batch is padded to a
    multiple of the ranks with samples that have no ids and weight 0.

    Args:
        part: where the samples come from.
        fields: names of the id fields.
        batch_size: samples of a global batch, a multiple of `world_size`.
        rank, world_size: this process among all.
        seed: seed of the order of rows, where the part wants one.
    """

    def __init__(
        self,
        part: Part,
        fields: Sequence[str],
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int = 0,
    ) -> None:
        if batch_size % world_size:
            raise ValueError(f"batch_size {batch_size} is not a multiple of {world_size} ranks")
        self._part = part
        self._fields = list(fields)
        self._batch_size = batch_size
        self._rank = rank
        self._world_size = world_size
        self._seed = seed

    def __len__(self) -> int:
        """Batches in an epoch."""
        return -(-self._part.rows // self._batch_size)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The batches of an epoch; its order depends on (seed, epoch) only."""
        order = None
        if self._part.shuffle:
            order = np.random.default_rng([self._seed, epoch]).permutation(self._part.rows)
        for start in range(0, self._part.rows, self._batch_size):
            samples = min(self._batch_size, self._part.rows - start)
            local = -(-samples // self._world_size)
            first = min(self._rank * local, samples)
            last = min(first + local, samples)
            rows = np.arange(start + first, start + last)
            if order is not None:
                rows = order[rows]
            yield self._batch(rows, local, samples)

    def _batch(self, rows: np.ndarray, local: int, samples: int) -> Batch:
        read = self._part.read(rows)
        padding = local - len(rows)
        lengths = torch.zeros(len(self._fields), local, dtype=torch.int32)
        lengths[:, : len(rows)] = 1
        ids = torch.from_numpy(np.ascontiguousarray(read.ids.T, dtype=np.int64))
        return Batch(
            sparse=KeyedJaggedTensor(
                keys=self._fields, values=ids.view(-1), lengths=lengths.view(-1), stride=local
            ),
            dense=_padded(read.dense, padding),
            label=_padded(read.label, padding),
            weight=_padded(np.ones(len(rows)), padding),
            global_samples=samples,
            true_probability=(
                None if read.true_probability is None else _padded(read.true_probability, padding)
            ),
        )


def _padded(values: np.ndarray, rows: int) -> torch.Tensor:
    """`values` as float32 with `rows` more rows of zeros."""
    widths = [(0, rows)] + [(0, 0)] * (values.ndim - 1)
    return torch.from_numpy(np.pad(values.astype(np.float32), widths))
