"""Global batches of a part: the same samples in batch k on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from stampede.data.errors import DataError
from stampede.data.order import Order
from stampede.data.parallel import computed_ahead, run_tasks
from stampede.data.samples import Batch, Part, Samples, aligned

# Positions whose rows are sorted together. A constant, as it decides the order within a batch;
# small enough that two cores share a batch of 65536.
_SORTED = 1 << 15


class GlobalBatches:
    """One rank's share of a part's global batches; iterating gives the rest of an epoch.

    Every rank gets the same number of samples of every batch: the last global batch is padded to a
    multiple of the ranks, or of the tiles, with samples without ids and with weight 0. A rank
    sorts its rows of a batch in stretches, which changes gradients and metrics in their last bits
    only. With tiles it changes nothing: the samples of each tile and their order are the same on
    any number of ranks.

    The rows of a batch depend only on the order, the epoch and the batch's number. `state_dict`
    covers what the consumer has received, not what was read ahead; after `load_state_dict`, any
    number of ranks continues from there (torchdata's stateful protocol). A new iterator also
    continues: with the next epoch after the last batch, with the next batch after a break. Older
    iterators then raise a RuntimeError.

    Args:
        part: where the samples come from.
        fields: names of the id fields, single-valued ones first.
        batch_size: samples of a global batch, a multiple of `world_size`.
        rank, world_size: this process among all.
        order: of the rows in each epoch; default: first to last.
        ahead: batches read ahead by a thread.
        pin: GPU to put batches into page-locked memory for.
        before_reading: called with epoch and position of each batch before it is read.
        unknown_rows: see `Dataset`; kept as an attribute.
        tiles: equal parts of a global batch, a multiple of `world_size`, divided equally among the
            ranks; 0: none.
    """

    def __init__(
        self,
        part: Part,
        fields: Sequence[str],
        batch_size: int,
        rank: int,
        world_size: int,
        order: Order | None = None,
        *,
        ahead: int = 0,
        pin: torch.device | None = None,
        before_reading: Callable[[int, int], None] | None = None,
        unknown_rows: Mapping[str, tuple[int, ...]] | None = None,
        tiles: int = 0,
    ) -> None:
        if batch_size % world_size:
            raise ValueError(f"batch_size {batch_size} is not a multiple of {world_size} ranks")
        if tiles % world_size:
            raise ValueError(f"{tiles} tiles are not a multiple of {world_size} ranks")
        self._part = part
        self._fields = list(fields)
        self._batch_size = batch_size
        self._rank = rank
        self._world_size = world_size
        self._order = order or Order(part.rows)
        if self._order.rows != part.rows:
            raise ValueError(f"an order of {self._order.rows} rows for a part of {part.rows}")
        self._described = asdict(self._order)
        # Of this rank.
        self._tiles = tiles // world_size
        self._ahead = ahead
        self._pin = pin
        self._before_reading = before_reading
        self.unknown_rows = unknown_rows or {}
        self._epoch = 0
        self._samples = 0
        # Number of the newest iterator, the only one that may move the position.
        self._generation = 0
        # Lengths of the single-valued fields, shared by all batches of a size: filling them would
        # take a fifth of a batch's time.
        self._ones: dict[tuple[int, ...], Tensor] = {}
        # See `_ordered`.
        self._stretch: tuple[tuple[int, int], np.ndarray] | None = None

    @property
    def rows(self) -> int:
        """Samples of an epoch on all ranks together."""
        return self._part.rows

    def __len__(self) -> int:
        """Batches of an epoch."""
        return -(-self._part.rows // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """The batches from here to the end of the epoch."""
        self._generation += 1
        return self._rest(self._generation, self._epoch, self._samples)

    def _rest(self, generation: int, epoch: int, samples: int) -> Iterator[Batch]:
        starts = range(samples, self._part.rows, self._batch_size)
        for batch in computed_ahead(partial(self._read, epoch), starts, self._ahead):
            if generation != self._generation:
                raise RuntimeError(
                    "this iterator is outdated: a newer one was made, or a state was loaded; use "
                    "the newest one"
                )
            self._samples += batch.global_samples
            if self._samples == self._part.rows:
                self._epoch, self._samples = epoch + 1, 0
            yield batch

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """All batches of an epoch, from its first."""
        self._epoch, self._samples = epoch, 0
        return iter(self)

    def state_dict(self) -> dict[str, Any]:
        """The consumer's progress: epochs, samples of the current one, and their order."""
        return {
            "epoch": self._epoch,
            "samples": self._samples,
            "batch_size": self._batch_size,
            "order": dict(self._described),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was saved, on any number of ranks.

        Raises:
            DataError: the state is of other data or another order, or was saved within an epoch of
                another batch size.
        """
        epoch, samples, batch_size = (state[key] for key in ("epoch", "samples", "batch_size"))
        order = Order(**state["order"]).deciding()
        for key, now in self._order.deciding().items():
            then = order.get(key)
            if then != now:
                raise DataError(
                    f"the state was saved with {key}={then!r}, now it is {now!r}; restore "
                    f"{then!r}, or rows would be repeated or skipped"
                )
        if samples and batch_size != self._batch_size:
            raise DataError(
                f"the state was saved after {samples:,} samples of an epoch with "
                f"batch_size={batch_size}, now it is {self._batch_size}; restore the batch size, "
                "or change it at the start of an epoch"
            )
        self._generation += 1
        self._epoch, self._samples = epoch, samples

    def _read(self, epoch: int, start: int) -> Batch:
        if self._before_reading is not None:
            self._before_reading(epoch, start)
        samples = min(self._batch_size, self._part.rows - start)
        parts = self._tiles or 1
        tile = -(-samples // (self._world_size * parts))
        local = tile * parts
        first = min(self._rank * local, samples)
        last = min(first + local, samples)
        stretch = tile if self._tiles else _SORTED
        rows = self._rows(epoch, start + first, start + last, stretch)
        read = self._part.read(rows)
        padding = local - len(read.label)
        weight, probability = read.weight, read.true_probability
        if weight is None and self._part.device.type == "cpu":
            # With numpy: torch's threads would spin while others gather.
            weight = torch.from_numpy(np.ones(len(read.label), dtype=np.float32))
        elif weight is None:
            weight = torch.ones(len(read.label), device=self._part.device)
        batch = Batch(
            sparse=self._jagged(read, padding),
            dense=aligned(_padded(read.dense, padding)),
            label=_padded(read.label.float(), padding),
            weight=_padded(weight, padding),
            global_samples=samples,
            global_weight=self._global_weight(epoch, start, samples, read, stretch),
            samples=len(read.label),
            rows=_padded(rows, padding),
            true_probability=None if probability is None else _padded(probability, padding),
            tiles=self._tiles,
        )
        if self._pin is None:
            return batch
        # Without a device, this thread would also open the first GPU.
        with torch.cuda.device(self._pin):
            return batch.pin_memory()

    def _rows(self, epoch: int, start: int, stop: int, stretch: int) -> Tensor:
        """The rows at some positions, sorted in stretches, so that memory is read in order."""
        order, device = self._order, self._part.device
        if device.type != "cpu":
            rows = order.rows_at(epoch, start, stop, partial(torch.arange, device=device))
            return torch.cat([part.sort().values for part in rows.split(stretch)])
        # numpy permutes and sorts faster than torch, and narrow integers faster than wide ones.
        rows = np.empty(stop - start, np.int64)
        narrow = np.int32 if self._part.rows < 2**31 else np.int64
        few = stop - start < _SORTED // 8
        ordered = self._ordered if few else order.rows_at

        def fill(first: int) -> None:
            part = ordered(epoch, first, min(first + stretch, stop))
            rows[first - start : first - start + stretch] = np.sort(part.astype(narrow))

        run_tasks(fill, range(start, stop, stretch))
        return torch.from_numpy(rows)

    def _ordered(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """The order's rows at a few positions; a call costs as much as thousands of rows."""
        key, first = (epoch, start // _SORTED), start // _SORTED * _SORTED
        if self._stretch is None or self._stretch[0] != key:
            last = min(first + _SORTED, self._part.rows)
            self._stretch = key, self._order.rows_at(epoch, first, last)
        found = self._stretch[1][start - first : stop - first]
        rest = stop - start - len(found)
        if not rest:
            return found
        return np.concatenate([found, self._ordered(epoch, stop - rest, stop)])

    def _global_weight(
        self, epoch: int, start: int, samples: int, read: Samples, stretch: int
    ) -> float | Tensor:
        """Sum of all weights; each rank reads them all, which saves a collective."""
        weights, has_goals = read.weight, read.label.ndim == 2
        if weights is None and not has_goals:
            return float(samples)
        labels = read.label
        if self._world_size > 1:
            rows = self._rows(epoch, start, start + samples, stretch)
            weights = self._part.weight(rows)
            labels = self._part.label(rows) if has_goals else labels
        if has_goals:
            known = (~labels.isnan()).double()
            return known.sum(0) if weights is None else weights.double() @ known
        if weights.device.type == "cpu":
            # With numpy: torch's threads would wait for each other on a busy machine.
            return float(weights.numpy().sum(dtype=np.float64))
        return weights.double().sum()  # without waiting for the GPU

    def _jagged(self, read: Samples, padding: int) -> KeyedJaggedTensor:
        ids, rows = read.ids.T, len(read.label)
        shape = tuple(ids.shape)
        if shape not in self._ones:
            self._ones[shape] = torch.ones(shape, dtype=torch.int32, device=self._part.device)
        values, lengths = ids.reshape(-1), self._ones[shape]
        if read.bags:
            values = torch.cat([values, *(bag.values.to(values.dtype) for bag in read.bags)])
            lengths = torch.cat([lengths, torch.stack([bag.lengths.int() for bag in read.bags])])
        weights = None
        if any(bag.weights is not None for bag in read.bags):
            # TorchRec has weights of all ids or of none.
            weights = torch.ones(len(values), device=values.device)
            ends = weights.split([ids.numel(), *(len(bag.values) for bag in read.bags)])[1:]
            for bag, part in zip(read.bags, ends, strict=True):
                if bag.weights is not None:
                    part.copy_(bag.weights)
        if padding:
            lengths = functional.pad(lengths, [0, padding])
        return KeyedJaggedTensor(
            keys=self._fields,
            values=values,
            weights=weights,
            lengths=lengths.reshape(-1),
            stride=rows + padding,
            # Without it, TorchRec would wait for the GPU to count them.
            length_per_key=[rows] * len(ids) + [len(bag.values) for bag in read.bags],
        )


def _padded(values: Tensor, rows: int) -> Tensor:
    """`values` with `rows` more rows of zeros."""
    return functional.pad(values, [0, 0] * (values.ndim - 1) + [0, rows]) if rows else values
