"""What of a checkpoint was brought into a run, what was not, and what begins anew."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stampede.settings import cut

# Columns of a terminal.
_WIDTH = 100

# Of more fields, and of more tensors, the file tells the names.
_MOST_FIELDS, _MOST_TENSORS = 60, 4

_COLUMNS = ("rows", "loaded", "new", "not taken")


@dataclass(frozen=True)
class FieldReport:
    """What became of a field's table.

    Attributes:
        field: its name.
        rows: of the table now; 0 where the run has no such field.
        loaded: rows that have the values of the checkpoint.
        new: rows that have initial values.
        dropped: rows of the checkpoint's table that are in no row now.
        why: why none was loaded; else empty.
    """

    field: str
    rows: int
    loaded: int
    new: int
    dropped: int
    why: str


@dataclass(frozen=True)
class LoadReport:
    """What became of a checkpoint.

    Attributes:
        checkpoint: its folder.
        step: that it was made after.
        fields: tables of the run, then those that only the checkpoint has.
        loaded: names of all other tensors that were loaded.
        new: names of all other tensors of the run, and why they begin anew.
        dropped: names of all other tensors of the checkpoint, and why they are not used.
        note: on the layers; or empty.
    """

    checkpoint: str
    step: int
    fields: list[FieldReport]
    loaded: list[str]
    new: Mapping[str, str]
    dropped: Mapping[str, str]
    note: str = ""

    def values(self) -> dict[str, Any]:
        """As it is written to a file."""
        return asdict(self)

    def lines(self) -> list[str]:
        """As it is shown, in at most 100 columns where names are not longer."""
        width = min(max([5, *(len(one.field) for one in self.fields)]), 32)
        head = f"  {'field':<{width}}" + "".join(f"  {name:>13}" for name in _COLUMNS)
        found = [head.rstrip()]
        for one in self.fields[:_MOST_FIELDS]:
            row, why = _row(one.field, one, width), one.why and f"  {one.why}"
            found += [row + why] if len(row + why) <= _WIDTH else [row, *_wrapped(f"    {why}", 6)]
        if len(self.fields) > _MOST_FIELDS:
            found.append(f"  and {len(self.fields) - _MOST_FIELDS} more fields")
        total = _total(self.fields)
        found.append(_row("all", total, width))
        if not total.loaded:
            found.append(
                "  NO ROW of a table was loaded: no field has the name, dim and kind of ids"
            )
        found += self._tensors("dense layers", ("model.",))
        found += _wrapped(f"    {self.note}", 4) if self.note else []
        found += self._tensors("optimizer state", ("fused.", "dense."))
        return found

    def _tensors(self, what: str, kinds: tuple[str, ...]) -> list[str]:
        loaded = sum(name.startswith(kinds) for name in self.loaded)
        found = [f"  {what}: {loaded} tensors loaded"]
        others = {name: why for name, why in self.dropped.items() if name not in self.new}
        for told, tensors in (("begin anew", self.new), ("not taken", others)):
            chosen = {n: why for n, why in tensors.items() if n.startswith(kinds)}
            found += _wrapped(f"    {told}: {_grouped(chosen)}", 4) if chosen else []
        return found


def _grouped(tensors: Mapping[str, str]) -> str:
    """Names by reason, or how many they are."""
    by_reason: dict[str, list[str]] = {}
    for name, why in tensors.items():
        by_reason.setdefault(why, []).append(name.partition(".")[2])
    parts = []
    for why, names in by_reason.items():
        shown = ", ".join(names) if len(names) <= _MOST_TENSORS else f"{len(names)} tensors"
        parts.append(f"{shown} ({why})")
    return cut("; ".join(parts))


def _row(name: str, one: FieldReport, width: int) -> str:
    numbers = (one.rows, one.loaded, one.new, one.dropped)
    return f"  {cut(name):<{width}}" + "".join(f"  {number:>13,}" for number in numbers)


def _total(fields: Iterable[FieldReport]) -> FieldReport:
    fields = list(fields)
    sums = (sum(getattr(f, name) for f in fields) for name in ("rows", "loaded", "new", "dropped"))
    return FieldReport("all", *sums, "")


def _wrapped(line: str, indent: int) -> list[str]:
    return textwrap.wrap(line, _WIDTH, subsequent_indent=" " * (indent + 4), break_on_hyphens=False)
