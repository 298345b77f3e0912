"""What a prepared data set consists of: `manifest.json` in its folder."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from stampede.data.errors import DataError
from stampede.data.schema.schema import MOST_ROWS, FieldName
from stampede.files import MOST_MANIFEST, FileEntry, read_file
from stampede.settings import Section, counted, cut, reading

# Incremented when the layout or its meaning changes; other formats are refused.
FORMAT = 2

MANIFEST = "manifest.json"

LEARNED_FOLDER = "learned"
BAD_ROWS = "bad_rows.jsonl"

PartName = Literal["train", "validation", "test"]
PARTS: tuple[PartName, ...] = ("train", "validation", "test")
# Their places.
TRAIN, VALIDATION, TEST = range(len(PARTS))

# Larger numbers are refused, so that the product of two counts stays a reasonable number.
Count = Annotated[int, Field(ge=0, lt=2**62)]

REMEDY = "delete the folder to prepare it again"


class FieldEntry(Section):
    """An id field."""

    name: FieldName
    rows: Annotated[int, Field(ge=1, le=MOST_ROWS)]  # of its table
    missing_row: Count | None = None  # of a missing value, if known
    unseen_row: Count | None = None  # of rare ids and ids absent from the training part, if any
    multi: bool = False  # whether a sample has any number of ids
    table: FieldName | None = None  # the field whose table it uses; none: its own
    # Of the embeddings of a sample's ids.
    pooling: Literal["sum", "mean", "attention", "none"] = "sum"
    weighted: bool = False  # whether its ids have weights
    query: FieldName | None = None  # the field that attends to its ids, or reads them one by one

    @property
    def unknown_rows(self) -> tuple[int, ...]:
        """Rows that belong to no single id."""
        return tuple(row for row in (self.missing_row, self.unseen_row) if row is not None)


class ShardEntry(Section):
    """Some rows of a part, one `.npy` file per array.

    The arrays: `ids` `[rows, single-valued fields]`, `numbers` `[rows, numbers]`, `label` `[rows]`
    uint8, or float32 with soft labels, or with several goals `[rows, goals]` float32, NaN where a
    label is missing; if the data have them, `weight` `[rows]` float32, `time` `[rows]` int64
    seconds; for the multi-valued field number i (of those) `offsets_i` `[rows + 1]` int64, from 0,
    into `values_i`, and, if its ids have weights, `weights_i` float32.
    """

    rows: Annotated[int, Field(ge=1, lt=2**62)]
    files: dict[str, FileEntry]

    @field_validator("files", mode="before")
    @classmethod
    def _without_times(cls, files: Any) -> Any:
        """Drop the file times that older versions wrote."""
        for entry in files.values() if isinstance(files, dict) else ():
            if isinstance(entry, dict):
                entry.pop("mtime_ns", None)
        return files


class Manifest(Section):
    """A whole prepared data set."""

    format: Literal[2] = FORMAT
    version: str  # of stampede
    fields: list[FieldEntry]  # single-valued ones first, in the order of `ids`
    numbers: list[FieldName]  # in the order of the array
    goals: list[FieldName] = Field([])  # in the order of the labels; empty for a single label
    ids_dtype: Literal["int32", "int64"] = "int32"  # also of `values_i`
    numbers_dtype: Literal["float32", "float16"] = "float32"
    has_weight: bool = False
    has_time: bool = False
    parts: dict[PartName, list[ShardEntry]]  # shards in order
    # Files with what was learned from the training part.
    learned: list[FileEntry] = Field(default_factory=list)
    bad_rows: Count = 0  # number of rows left out; they are in `bad_rows.jsonl`
    period: Count = 0  # number of this period of a log, from 1; 0 of a log without periods
    rows_before: Count = 0  # training rows of earlier periods
    source: dict[str, Any] = Field(default_factory=dict)  # what the data were made of, and how

    def single(self) -> list[FieldEntry]:
        """Fields with one id per sample."""
        return [entry for entry in self.fields if not entry.multi]

    def multi(self) -> list[FieldEntry]:
        """Fields with any number of ids per sample."""
        return [entry for entry in self.fields if entry.multi]

    def arrays(self) -> list[str]:
        """Names of a shard's arrays."""
        names = ["ids", "numbers", "label"]
        names += ["weight"] * self.has_weight + ["time"] * self.has_time
        for i, entry in enumerate(self.multi()):
            names += [f"offsets_{i}", f"values_{i}"] + [f"weights_{i}"] * entry.weighted
        return names

    def rows(self, part: PartName) -> int:
        """Rows of a part."""
        return sum(shard.rows for shard in self.parts.get(part, []))

    def shards(self) -> list[ShardEntry]:
        """Shards of all parts."""
        return [shard for shards in self.parts.values() for shard in shards]


def read_manifest(folder: Path, remedy: str = REMEDY) -> Manifest:
    """The manifest of a prepared folder.

    Raises:
        DataError: it is missing, damaged, or of another format; ends with `remedy`.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise DataError(f"{folder}: no prepared data here ({MANIFEST} is missing)")
    with reading(path, DataError, remedy, "damaged, or of another version of stampede"):
        return Manifest.model_validate_json(read_file(path, MOST_MANIFEST))


def whole_ids_sentence(columns: Mapping[str, int]) -> str:
    """A sentence on ids that were read without their `.0`, by column."""
    cells = counted(sum(columns.values()), "id")
    return f"read {cells} such as 45.0 as the whole number 45: {_by_column(columns)}"


def rounded_numbers_sentence(columns: Mapping[str, int]) -> str:
    """A sentence on whole numbers that lost digits, by column."""
    cells = counted(sum(columns.values()), "whole number")
    return (
        f"rounded {cells} above {2**24:,} to float32: {_by_column(columns)}; if their last digits "
        "matter, make the column an id"
    )


def _by_column(counts: Mapping[str, int]) -> str:
    return cut(", ".join(f"{name} {cells:,}" for name, cells in counts.items()))


def prepared_summary(folder: Path, name: object = None) -> str:
    """Rows, fields and size of a prepared folder, for a person; by default under its own name."""
    manifest = read_manifest(folder)
    lines = [f"  {part:<12}{counted(manifest.rows(part), 'row'):>21}" for part in PARTS]
    ids = sum(entry.rows for entry in manifest.fields if entry.table is None)
    size = sum(entry.bytes for shard in manifest.shards() for entry in shard.files.values())
    fields = counted(len(manifest.fields), "id field")
    lines.append(f"  {fields} with {counted(ids, 'row')} of tables together")
    lines.append(f"  {counted(len(manifest.numbers), 'number')}; {size / 1e6:,.0f} MB")
    for key in ("features", "advice"):
        if key in manifest.source:
            said = f"{key}: {manifest.source[key]}"
            lines += textwrap.wrap(said, 98, initial_indent="  ", subsequent_indent="    ")
    return "\n".join([str(name or folder), *lines])
