"""Data types of training: a data set and its parts, samples, and a rank's batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

Array = TypeVar("Array", np.ndarray, Tensor)

# Rows whose labels are read at a time.
_CHUNK, _FEW = 1 << 20, 1 << 16

# A sample of a part: this many runs of this many rows.
_RUNS, _RUN_ROWS = 64, 1024

# Alignment of torch's allocator, in bytes.
_ALIGNED = 64


def aligned(values: Tensor) -> Tensor:
    """The values, copied if they are not aligned as freshly allocated memory.

    Otherwise the rounding of matrix products depends on where a slice, or numpy's array, lies.
    """
    return values.clone() if values.data_ptr() % _ALIGNED else values


@dataclass(frozen=True)
class Bag:
    """Ids of a multi-valued field for some samples.

    Attributes:
        values: `[ids]` integer, rows of the field's table, sample after sample.
        lengths: `[n]` integer, number of ids of each sample.
        weights: `[ids]` float32, weight of each id; None if all are 1.
    """

    values: Tensor
    lengths: Tensor
    weights: Tensor | None = None


@dataclass(frozen=True)
class Samples:
    """Some rows of a part.

    Attributes:
        ids: `[n, single-valued fields]` integer, row of each field's table.
        dense: `[n, numbers]` float32.
        label: `[n]`, 0 or 1; with several goals `[n, goals]` float32, NaN where one is missing.
        bags: ids of each multi-valued field.
        weight: `[n]` float32, weight of each sample; None if all weights are 1.
        true_probability: float32, like `label`, of synthetic clicks; else None.
    """

    ids: Tensor
    dense: Tensor
    label: Tensor
    bags: tuple[Bag, ...] = ()
    weight: Tensor | None = None
    true_probability: Tensor | None = None


class Part(Protocol):
    """Rows 0 to `rows - 1` of one part of a data set; rows and samples are on `device`."""

    rows: int
    device: torch.device

    def read(self, rows: Tensor) -> Samples:
        """The given rows (`[n]` int64 on `device`), in that order."""
        ...

    def label(self, rows: Tensor) -> Tensor:
        """Labels of the given rows, see `Samples`."""
        ...

    def weight(self, rows: Tensor) -> Tensor | None:
        """Weights of the given rows, `[n]` float32; None if all weights are 1."""
        ...


@dataclass(frozen=True)
class Dataset:
    """A data set ready for training.

    Attributes:
        vocabulary_sizes: rows of each field's table, by field name: the single-valued fields in
            the order of `Samples.ids`, then the multi-valued ones in the order of `Samples.bags`.
        numbers: number of numeric inputs.
        train, test: parts.
        validation: part that the best epoch is chosen on, or None.
        multi: names of the multi-valued fields.
        mean: names of the multi-valued fields whose embeddings are averaged, not summed.
        weighted: names of the multi-valued fields whose ids have weights.
        attention, sequences: the query of each multi-valued field that the model attends to, or
            whose embeddings the network takes one by one.
        shared: the field whose table a field uses, by field; others have tables of their own.
        goals: names of the goals, in the order of the labels; empty for a single label.
        has_weight: whether samples have weights.
        unknown_rows: by field name, the rows of its table that belong to no single id: the row
            of missing values, and the row that rare and unseen ids share.
        unseen_rows: by field name, the row of rare and unseen ids, if the field has one.
        shuffle: whether each epoch shuffles the training rows; False for samples that were drawn
            independently.
        vocabulary_sha256: `vocabulary_fingerprint` of the data; empty for synthetic clicks.
        features: how the log became ids and numbers, in words; may be empty.
        advice: what looked wrong when the log was prepared; may be empty.
        period: number of the period of a log, from 1; 0 for data without periods. The rows of a
            period are scored, as `test`, before they are trained on.
        rows_before: training rows of earlier periods.
        rows_of_new_ids: by field name, rows of its table that went to new ids in this period.
    """

    vocabulary_sizes: Mapping[str, int]
    numbers: int
    train: Part
    validation: Part | None
    test: Part
    multi: tuple[str, ...] = ()
    mean: tuple[str, ...] = ()
    weighted: tuple[str, ...] = ()
    attention: Mapping[str, str] = field(default_factory=dict)
    sequences: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    goals: tuple[str, ...] = ()
    has_weight: bool = False
    unknown_rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unseen_rows: Mapping[str, int] = field(default_factory=dict)
    shuffle: bool = True
    vocabulary_sha256: str = ""
    features: str = ""
    advice: str = ""
    period: int = 0
    rows_before: int = 0
    rows_of_new_ids: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def tables(self) -> dict[str, int]:
        """Rows of each table, by the field whose own it is."""
        sizes = self.vocabulary_sizes.items()
        return {name: rows for name, rows in sizes if name not in self.shared}

    def parts(self) -> dict[str, Part]:
        """The parts that exist, by name."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: part for name, part in parts.items() if part is not None}


class Slice:
    """Rows `start` to `stop - 1` of another part, as a `Part`."""

    def __init__(self, part: Part, start: int, stop: int) -> None:
        self.rows, self.device = stop - start, part.device
        self._part, self._start = part, start

    def read(self, rows: Tensor) -> Samples:
        """See `Part`."""
        return self._part.read(rows + self._start)

    def label(self, rows: Tensor) -> Tensor:
        """See `Part`."""
        return self._part.label(rows + self._start)

    def weight(self, rows: Tensor) -> Tensor | None:
        """See `Part`."""
        return self._part.weight(rows + self._start)


@dataclass
class Batch(Pipelineable):
    """One rank's part of a global batch: samples, then padding.

    Attributes:
        sparse: ids of every field, single-valued ones first; none for padding. Batches may share
            the lengths: do not modify them.
        dense: `[n, numbers]` float32.
        label: `[n]` float32, 0 or 1; with several goals `[n, goals]`, NaN where one is missing.
        weight: `[n]` float32, weight of each sample in the loss: 1 if the data have no weights, 0
            for padding.
        global_samples: samples of the global batch, without padding.
        global_weight: sum of the weights of the global batch, a float64 scalar tensor if the
            weights are on a GPU; with several goals, of the samples with a label of each,
            `[goals]` float64; default: `global_samples`.
        samples: this rank's samples, without padding; default: all.
        rows: `[n]` int64, the samples' rows in their part, which name them on any number of ranks;
            None: without names.
        true_probability: float32, like `label`, its probability, for synthetic clicks.
        tiles: equal parts of these samples that are computed one by one, see `GlobalBatches`; 0:
            none.
    """

    sparse: KeyedJaggedTensor
    dense: Tensor
    label: Tensor
    weight: Tensor
    global_samples: int
    global_weight: float | Tensor | None = None
    samples: int | None = None
    rows: Tensor | None = None
    true_probability: Tensor | None = None
    tiles: int = 0

    def __post_init__(self) -> None:
        if self.global_weight is None:
            self.global_weight = float(self.global_samples)
        if self.samples is None:
            self.samples = len(self.label)

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The batch on `device`."""
        if self.label.device == device:
            return self
        copies = {n: one.to(device, non_blocking=non_blocking) for n, one in self._tensors()}
        return replace(self, **copies)

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory, for asynchronous copies to a GPU."""
        return replace(self, **{name: one.pin_memory() for name, one in self._tensors()})

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that `stream` uses this batch."""
        for _, one in self._tensors():
            one.record_stream(stream)

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        for one in fields(self):
            held = getattr(self, one.name)
            if isinstance(held, (Tensor, KeyedJaggedTensor)):
                yield one.name, held


def sampled_rows(rows: int) -> np.ndarray:
    """A sample of a part: evenly spaced runs of rows; all rows of a small part."""
    if rows <= _RUNS * _RUN_ROWS:
        return np.arange(rows)
    starts = np.linspace(0, rows - _RUN_ROWS, _RUNS).astype(np.int64)
    return (starts[:, None] + np.arange(_RUN_ROWS)).ravel()


def only_labels(part: Part) -> list[float | None]:
    """By goal, the label that all rows of a part have: NaN for none; None if both occur."""
    found: list[set[float]] = []
    # The first rows usually suffice, and synthetic rows are slow to draw.
    for start in range(0, part.rows, _FEW):
        rows = torch.arange(start, min(start + _FEW, part.rows), device=part.device)
        columns = by_goal(part.label(rows))
        found = found or [set() for _ in columns]
        for seen, column in zip(found, columns, strict=True):
            seen.update(column[~column.isnan()].unique().tolist())
        if all(len(seen) > 1 for seen in found):
            break
    return [None if len(seen) > 1 else next(iter(seen), math.nan) for seen in found]


class ClickShare(NamedTuple):
    """The weighted share of clicks among a goal's labels; None if all weights are 0.

    `labels` is their number; with weights, that of equal ones which tell as much (Kish).
    """

    share: float | None
    labels: float


def click_shares(part: Part) -> list[ClickShare]:
    """By goal, of a part's labels; rows whose label is missing do not count."""
    clicks: dict[int, float] = Counter()
    total: dict[int, float] = Counter()
    squares: dict[int, float] = Counter()
    goals = 0
    for start in range(0, part.rows, _CHUNK):
        rows = torch.arange(start, min(start + _CHUNK, part.rows), device=part.device)
        columns, weights = by_goal(part.label(rows)).double(), part.weight(rows)
        goals = len(columns)
        for goal, column in enumerate(columns):
            known = ~column.isnan()
            label = column[known]
            weight = torch.ones_like(label) if weights is None else weights[known].double()
            clicks[goal] += float(label @ weight)
            total[goal] += float(weight.sum())
            squares[goal] += float(weight @ weight)
    return [
        ClickShare(clicks[goal] / total[goal], total[goal] ** 2 / squares[goal])
        if total[goal]
        else ClickShare(None, 0.0)
        for goal in range(goals)
    ]


def by_goal(values: Array) -> Array:
    """`[goals, n]` from `[n]` or `[n, goals]`, a tensor or an array."""
    return values.reshape(len(values), -1).T
