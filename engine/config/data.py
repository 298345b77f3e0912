"""The section `data`: one model per kind of data."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from stampede.data.options import PreparationOptions
from stampede.data.prepared.manifest import MOST_ROWS, FieldName
from stampede.settings import Section, Seed


class ReadingSection(Section):
    """How prepared data are read."""

    residence: Literal["auto", "disk", "memory", "device"] = Field(
        "auto",
        description="where the data are during training; changes the speed, never the batches. "
        "auto: the GPU where they take less than half of its free memory, else main memory up to "
        "memory_gb, else disk",
    )
    shuffle: Literal["auto", "global", "block", "none"] = Field(
        "auto",
        description="order of the training rows in each epoch: over all rows; over blocks, then "
        "within windows of a quarter of memory_gb; as they stand. auto: block where the training "
        "part is larger than memory_gb, else global",
    )
    memory_gb: float = Field(
        16.0, gt=0, description="main memory that the data may take on a machine, in 10^9 bytes"
    )


class SyntheticSection(Section):
    """Synthetic clicks with a known truth."""

    kind: Literal["synthetic"] = Field("synthetic", description="where the clicks come from")
    rows: int = Field(2_000_000, ge=100, description="training rows, validation included")
    test_rows: int = Field(100_000, ge=100, description="test rows, drawn separately")
    validation_fraction: float = Field(
        0.05, ge=0, lt=1, description="share of the training rows, from their end, for validation"
    )
    seed: Seed = Field(0, description="seed of the truth and of the samples")
    scale: float = Field(
        0.01, gt=0, le=1, description="number of ids relative to Criteo Kaggle's 33.8 million"
    )
    zipf: float = Field(1.2, gt=1, le=3, description="exponent of the ids' Zipf distribution")


class RawSection(ReadingSection, PreparationOptions):
    """A raw log, prepared on first use."""

    written: ClassVar[str] = "data."

    path: str | list[str] = Field(
        "", description="files, plain, .gz or .zst, or globs of them; required"
    )
    cache: str = Field("cache", description="folder for the prepared form")
    order_by: Literal["name", "time"] = Field(
        "name",
        description="split: periods. Which file comes first: by name, day_2 before day_10; by the "
        "smallest value of the schema's time among a file's first rows",
    )


class CriteoKaggleSection(RawSection):
    """Criteo's click log: label, I1-I13, C1-C26, tab separated."""

    kind: Literal["criteo_kaggle"] = Field(
        "criteo_kaggle", description="where the clicks come from"
    )


class Criteo1TBSection(RawSection):
    """Criteo's terabyte of clicks: the same columns in one file a day."""

    kind: Literal["criteo_1tb"] = Field("criteo_1tb", description="where the clicks come from")


class AvazuSection(RawSection):
    """Avazu's click log: CSV with a header."""

    kind: Literal["avazu"] = Field("avazu", description="where the clicks come from")
    split_hour: bool | None = Field(
        None,
        description="make hour of the day and weekday of `hour`; else it is an id, as in the "
        "paper; null: unless features is paper",
    )


class TableSection(RawSection):
    """Any log, described by a schema."""

    kind: Literal["table"] = Field("table", description="where the clicks come from")
    schema_file: str = Field("", description="YAML file that says what the columns mean; required")


class PreparedSection(ReadingSection):
    """A folder made by `stampede prepare`."""

    kind: Literal["prepared"] = Field("prepared", description="where the clicks come from")
    path: str = Field("", description="the folder; required")


def _whole(value: Any) -> Any:
    """`1e10` is a whole number too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Rows = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=MOST_ROWS)]


class SizesSection(Section):
    """Sizes of tables without any clicks, to plan with (`launch.py --plan`)."""

    kind: Literal["sizes"] = Field("sizes", description="where the clicks come from")
    tables: dict[FieldName, _Rows] = Field(
        {}, description="rows of the table of each id field, by its name; required"
    )
    ids_per_sample: dict[FieldName, Annotated[float, Field(gt=0)]] = Field(
        {}, description="mean number of ids of a sample, by field; 1 where none is given"
    )
    numbers: int = Field(0, ge=0, description="numeric inputs")
    zipf: float | None = Field(
        None,
        gt=1,
        le=3,
        description="exponent of the ids' Zipf distribution, the most frequent first; null: every "
        "row equally often",
    )


DataSection = Annotated[
    SyntheticSection
    | CriteoKaggleSection
    | Criteo1TBSection
    | AvazuSection
    | TableSection
    | PreparedSection
    | SizesSection,
    Field(discriminator="kind"),
]
