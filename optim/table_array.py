"""Tables of one width in one array, with the state of their optimizer, and its share in a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from stampede.optim.lookup import LookedUpGradients
from stampede.optim.rounding import random_unit, round_stochastically, table_key
from stampede.optim.rows import RowGradients
from stampede.optim.update_settings import UpdateSettings


@dataclass(frozen=True)
class TableShard:
    """A table, or a part of one; `counted` is False for all but one copy of a replicated table."""

    table: str
    rows: int
    row_offset: int = 0
    column_offset: int = 0
    counted: bool = True


@dataclass
class TableArray:
    """Tables of one width in one array, with their state."""

    # The tables or parts of tables, in the order of their rows; all begin at the same column.
    shards: tuple[TableShard, ...]
    weights: Tensor  # `[rows, dim]`, contiguous; fp32, fp64, fp16 or bf16.
    states: dict[
        str, Tensor
    ]  # `[rows, dim]` or `[rows]`; float64 with float64 weights, or float32.
    width: int  # Number of clipped columns of the whole tables, the same for all.
    local_width: int  # How many of this array's first columns are clipped ones.
    settings: UpdateSettings
    is_split: bool = False  # Whether other arrays hold other columns of these tables.
    frozen_row: int | None = None  # A row that is never changed (`padding_idx`).

    @classmethod
    def create(
        cls,
        shards: Sequence[TableShard],
        weights: Tensor,
        settings: UpdateSettings,
        dim: int,
        known: Mapping[str, Tensor] | None = None,
    ) -> TableArray:
        """Take weights and their state, or make it.

        Args:
            dim: columns of the whole tables.
            known: states that exist already; others are zero.

        Raises:
            ValueError: a state has another shape.
        """
        # Number of clipped columns of the whole table, and of these shards.
        width = min(settings.clip.columns or dim, dim)
        local_width = min(max(width - shards[0].column_offset, 0), weights.shape[1])
        states = {}
        for name, shape in settings.rule.state_shapes(*weights.shape, has_rest=width < dim).items():
            state = (known or {}).get(name)
            if state is None:
                state = torch.zeros(shape, dtype=state_dtype(weights), device=weights.device)
            elif state.shape != shape:
                raise ValueError(
                    f"the state {name!r} of a table of shape {tuple(weights.shape)} has shape "
                    f"{tuple(state.shape)} instead of {shape}; load the state_dict of the same "
                    "class and model"
                )
            states[name] = state
        is_split = weights.shape[1] < dim
        return cls(tuple(shards), weights, states, width, local_width, settings, is_split)

    @property
    def starts(self) -> list[int]:
        """First row of every shard, and the number of rows."""
        return list(accumulate((shard.rows for shard in self.shards), initial=0))

    @property
    def row_state_names(self) -> list[str]:
        """Names of the states with one value a row."""
        return [name for name, state in self.states.items() if state.ndim == 1]

    @property
    def element_state_names(self) -> list[str]:
        """Names of the states shaped like the weights."""
        return [name for name, state in self.states.items() if state.ndim == 2]

    @property
    def counts_rows(self) -> bool:
        """Whether this holds the first of the column shards and copies of its rows."""
        return self.shards[0].counted and self.shards[0].column_offset == 0

    def is_same(self, other: TableArray) -> bool:
        """Whether another array has the same settings and the same memory."""
        mine, others = (
            [(whole.data_ptr(), whole.dtype, whole.shape) for whole in array.all_tensors()]
            for array in (self, other)
        )
        same = self.settings == other.settings and self.frozen_row == other.frozen_row
        return same and self.shards == other.shards and mine == others

    def all_tensors(self) -> list[Tensor]:
        """Weights and states."""
        return [self.weights, *self.states.values()]

    def bounds_of(self, rows: Tensor) -> list[int]:
        """Start of each shard's rows among sorted rows of the array, and their end."""
        starts = torch.tensor(self.starts, device=rows.device)
        return torch.searchsorted(rows, starts).tolist()

    @contextmanager
    def keeping_frozen_row(self) -> Iterator[None]:
        """Restore the frozen row when the context ends."""
        kept = []
        if self.frozen_row is not None:
            kept = [(whole, whole[self.frozen_row].clone()) for whole in self.all_tensors()]
        yield
        for whole, row in kept:
            whole[self.frozen_row] = row

    def adam_tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Weights and both moments of Adam."""
        return self.weights, self.states["exp_avg"], self.states["exp_avg_sq"]

    def is_rounded(self) -> bool:
        """Whether the weights are less precise than the arithmetic."""
        return self.weights.dtype in (torch.float16, torch.bfloat16)

    def taken(self, rows: Tensor) -> Tensor:
        """A copy of rows' weights `[n, dim]`, in the dtype of the arithmetic."""
        weights = self.weights[rows]
        return weights.float() if self.is_rounded() else weights

    def rounded(self, values: Tensor, rows: Tensor, step: int) -> Tensor:
        """New weights `[n, dim]` of rows in their dtype, rounded stochastically if it is lower."""
        if not self.is_rounded():
            return values
        device = rows.device
        starts = torch.tensor(self.starts, device=device)
        shard = torch.searchsorted(starts, rows, right=True) - 1
        facts = torch.tensor(
            [
                (table_key(self.settings.seed, s.table), s.row_offset, s.column_offset)
                for s in self.shards
            ],
            device=device,
        )[shard]
        columns = facts[:, 2, None] + torch.arange(values.shape[1], device=device)
        unit = random_unit(facts[:, 0], rows - starts[shard] + facts[:, 1], columns, step)
        return round_stochastically(values, unit, self.weights.dtype)


def state_dtype(weights: Tensor) -> torch.dtype:
    """Dtype of the states of weights: float32, or float64 with float64 weights."""
    return torch.float64 if weights.dtype == torch.float64 else torch.float32


class Backend(Protocol):
    """The kernels of an array of tables, as far as a step needs them."""

    array: TableArray

    def measure(self, update: PendingUpdate) -> Measured:
        """First half of a step: what may have to be added up over ranks, or be refused."""
        ...

    def step_(self, measured: Measured) -> Tensor:
        """Second half: clip and step the batch's rows, and step all others that are due.

        Returns:
            `[3]` int64 on the device, how many of the batch's rows were touched, clipped and
            skipped. A row in several column shards or copies is counted in the first one only.
        """
        ...


@dataclass
class PendingUpdate:
    """One array's share in a step, counted from 1."""

    backend: Backend
    # Gradients of the batch's rows, of the mean loss over the global batch; rows count from the
    # start of the array. Of one lookup they need not be summed if the update is queued on a GPU.
    batch: RowGradients | LookedUpGradients
    lr: float
    step: int

    @property
    def array(self) -> TableArray:
        """The array that is updated."""
        return self.backend.array


@dataclass
class Measured:
    """An update and the values of rows that its step needs.

    Values are a matrix `[3 + row states, n]` that can be summed over column shards: squared norm of
    the gradient over the clipped columns and over the others, squared norm of the weights over the
    clipped columns, row states.
    """

    update: PendingUpdate  # Its gradients include the L2 term, and will be overwritten.
    # Of the batch's rows; None if the step computes them in its own pass, with nothing to add up
    # or to refuse before it.
    values: Tensor | None
    # Of all rows, as if their gradient were the L2 term; None if the step needs none.
    everything: Tensor | None = None
    skipped: int = 0  # Rows skipped because their gradient is not finite.

    def factors(self) -> tuple[Tensor | None, Tensor | None]:
        """Factors of the clipped columns: of the batch's rows, of all others; None for 1."""
        array, counts = self.update.array, self.update.batch.counts
        clip, everything = array.settings.clip, self.everything
        if not clip.clips:
            return None, None
        factor = clip.factor(self.values[0], self.values[2], counts, array.width)
        if everything is None or not clip.may_clip_decay(array.settings.l2):
            return factor, None
        once = torch.ones_like(everything[0])
        return factor, clip.factor(everything[0], everything[2], once, array.width)

    def counts(self, clipped: Tensor | int) -> Tensor:
        """What `Backend.step_` returns, given how many of the batch's rows were clipped."""
        rows = self.update.batch.rows
        counts = rows.new_tensor([len(rows), 0, self.skipped])
        counts[1] = clipped
        return counts * self.update.array.counts_rows
