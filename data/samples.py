"""Sources of samples: a part (training, validation, test) of a data set, row by row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

# Rows whose labels are read at a time.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Bag:
    """Ids of one multi-valued field, sample after sample.

    Attributes:
        values: `[ids]` integer, rows of the field's table.
        lengths: `[n]` integer, ids of each sample.
    """

    values: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class Samples:
    """Some rows of a part.

    Attributes:
        ids: `[n, single-valued fields]` integer, row of each field's table.
        dense: `[n, numbers]` float32.
        label: `[n]`, 0 or 1.
        bags: ids of each multi-valued field.
        weight: `[n]` float32, what the sample counts for; None where all count alike.
        true_probability: `[n]` float32 where the data know it, else None.
    """

    ids: Tensor
    dense: Tensor
    label: Tensor
    bags: tuple[Bag, ...] = ()
    weight: Tensor | None = None
    true_probability: Tensor | None = None


class Part(Protocol):
    """Rows 0 to `rows - 1` of one part of a data set."""

    rows: int
    # Where `read` wants its rows, and where the samples are.
    device: torch.device

    def read(self, rows: Tensor) -> Samples:
        """The given rows (`[n]` int64 on `device`), in that order."""
        ...

    def label(self, rows: Tensor) -> Tensor:
        """Labels of the given rows, `[n]`, 0 or 1."""
        ...

    def weight(self, rows: Tensor) -> Tensor | None:
        """Weights of the given rows, `[n]` float32; None where all count alike."""
        ...


@dataclass(frozen=True)
class Dataset:
    """A data set ready for training.

    Attributes:
        vocabulary_sizes: rows of each field's table, by field name: the single-valued fields in
            the order of `Samples.ids`, then the multi-valued ones in the order of `Samples.bags`.
        numbers: number of numeric inputs.
        train, test: parts.
        validation: part on which the best epoch is chosen, or None.
        multi: names of the multi-valued fields.
        has_weight: whether samples have weights.
        unknown_rows: rows of a field's table that are no id's own, by field name: that of missing
            values, and that which rare and unseen ids share.
        shuffle: whether an epoch is to visit the training rows in a new order; not where they were
            drawn independently.
        vocabulary_sha256: of what ids and numbers mean, see `vocabulary_fingerprint`; empty for
            synthetic clicks, whose ids are rows of their tables.
    """

    vocabulary_sizes: Mapping[str, int]
    numbers: int
    train: Part
    validation: Part | None
    test: Part
    multi: tuple[str, ...] = ()
    has_weight: bool = False
    unknown_rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    shuffle: bool = True
    vocabulary_sha256: str = ""


@dataclass(frozen=True)
class Slice:
    """Rows `start` to `stop - 1` of another part."""

    part: Part
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start

    @property
    def device(self) -> torch.device:
        """As of the other part."""
        return self.part.device

    def read(self, rows: Tensor) -> Samples:
        """The given rows, counted from `start`."""
        return self.part.read(rows + self.start)

    def label(self, rows: Tensor) -> Tensor:
        """Labels of the given rows, counted from `start`."""
        return self.part.label(rows + self.start)

    def weight(self, rows: Tensor) -> Tensor | None:
        """Weights of the given rows, counted from `start`."""
        return self.part.weight(rows + self.start)


def click_share(part: Part) -> float | None:
    """Weighted share of clicks among all rows of a part; None where these have no weight.

    Reads labels and weights only, some at a time.
    """
    clicks = total = 0.0
    for start in range(0, part.rows, _CHUNK):
        rows = torch.arange(start, min(start + _CHUNK, part.rows), device=part.device)
        label, weight = part.label(rows).double(), part.weight(rows)
        weight = torch.ones_like(label) if weight is None else weight.double()
        clicks += float(label @ weight)
        total += float(weight.sum())
    return clicks / total if total else None
