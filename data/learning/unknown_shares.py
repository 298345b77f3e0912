"""Shares of ids that are missing, or that the training did not see, by field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from stampede.data.prepared.manifest import FieldEntry

# By field the number of `ids`, and the shares of those that are `missing` and `unseen`.
Shares = Mapping[str, Mapping[str, float]]

KINDS = ("missing", "unseen")

# A share far above another one is more than this many times as large, and by more than this.
_TIMES, _MORE = 2.0, 0.15

# A share of fewer ids says little.
_FEWEST = 20

# Fields that a line names.
_MOST_FIELDS = 8


class UnknownIds:
    """Counts ids, and how many of them are missing or unseen.

    Args:
        new: by field, rows of its table that went to ids of this period of a log; they count as
            unseen, as no earlier period had them.

    Attributes:
        counts: `[fields, 3]` int64: all ids, missing ones, unseen ones.
    """

    def __init__(
        self, fields: Sequence[FieldEntry], new: Mapping[str, np.ndarray] | None = None
    ) -> None:
        self._fields = fields
        self.counts = np.zeros((len(fields), 3), np.int64)
        self._is_new = {}
        for field in fields:
            if new is not None and field.name in new:
                self._is_new[field.name] = np.zeros(field.rows, bool)
                self._is_new[field.name][new[field.name]] = True

    def add(self, ids: np.ndarray, bags: Sequence[np.ndarray]) -> None:
        """Count `ids` `[n, single-valued fields]` and the ids of each multi-valued one."""
        # A copy of each field by itself, as two scans of every n-th value take longer.
        columns = [*np.ascontiguousarray(ids.T), *bags]
        for counts, field, rows in zip(self.counts, self._fields, columns, strict=True):
            counts[0] += len(rows)
            for at, row in enumerate((field.missing_row, field.unseen_row), 1):
                if row is not None:
                    counts[at] += np.count_nonzero(rows == row)
            if field.name in self._is_new:
                counts[2] += np.count_nonzero(self._is_new[field.name][rows])

    def shares(self) -> dict[str, dict[str, float]]:
        """By field, without those that have no ids."""
        return {
            field.name: {
                "ids": counts[0],
                **{kind: n / counts[0] for kind, n in zip(KINDS, counts[1:], strict=True)},
            }
            for field, counts in zip(self._fields, self.counts.tolist(), strict=True)
            if counts[0]
        }


class Compared(NamedTuple):
    """What to tell a person about shares: a line for each kind, and warnings, a sentence each."""

    lines: Mapping[str, str]
    warnings: Sequence[str]


def compared(found: Shares, source: Mapping[str, Any], of: str = "") -> Compared:
    """Shares beside those that the `source` of a manifest records, best of the validation part.

    Args:
        of: what the manifest is about, if not about the data of the training.
    """
    parts = source.get("unknown_ids", {})
    part = next((name for name in ("validation", "test", "train") if parts.get(name)), "")
    usual: Shares = parts.get(part, {})
    of = of or f"the {part} part of the training's data"
    lines, warnings = {}, []
    for kind in KINDS:
        shares = {name: of_field[kind] for name, of_field in found.items() if of_field[kind]}
        before = {name: usual[name][kind] for name in shares if name in usual}
        names = sorted(shares, key=lambda name, shares=shares: -shares[name])
        cells = [
            f"{name} {shares[name]:.1%} ({before[name]:.1%})"
            if name in before
            else f"{name} {shares[name]:.1%}"
            for name in names[:_MOST_FIELDS]
        ]
        cells += [f"{len(names) - _MOST_FIELDS} more fields"] * (len(names) > _MOST_FIELDS)
        known = f"; in brackets: {of}" * bool(before)
        lines[f"{kind} ids"] = (", ".join(cells) or "none") + known
        warnings += [
            f"field {name}: {shares[name]:.1%} of the ids are {kind}, but only {share:.1%} in "
            f"{of}; check that they are written as there"
            for name, share in before.items()
            if shares[name] > _TIMES * share
            and shares[name] > share + _MORE
            and found[name]["ids"] >= _FEWEST
        ]
    return Compared(lines, warnings)
