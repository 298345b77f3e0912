"""The section `data`: one model per kind of data."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from stampede import stores
from stampede.data.options import PreparationOptions
from stampede.data.prepared.manifest import MOST_ROWS, FieldName
from stampede.settings import Section, Seed, SettingsError

if TYPE_CHECKING:
    # A configuration is checked without importing torch.
    from stampede.data.sources import Source
    from stampede.data.synthetic import SyntheticClicks
    from stampede.data.synthetic_histories import SyntheticHistories


class ReadingSection(Section):
    """How prepared data are read."""

    residence: Literal["auto", "disk", "memory", "device"] = Field(
        "auto",
        description="where the data are during training; affects the speed, never the batches. "
        "auto: the GPU if they take less than half of its free memory, else main memory up to "
        "memory_gb, else disk",
    )
    shuffle: Literal["auto", "global", "block", "none"] = Field(
        "auto",
        description="order of the training rows in each epoch. global: shuffles all rows; block: "
        "shuffles blocks, then rows within a quarter of memory_gb; none: as in the data. auto: "
        "block if the training part is larger than memory_gb, else global",
    )
    train_rows: int | None = Field(
        None,
        ge=1,
        description="train on the last so many rows of the training part, with the ids of all; "
        "null: on all rows",
    )
    memory_gb: float = Field(
        4.0, gt=0, description="main memory for the data on each machine, in 10^9 bytes"
    )


class SyntheticSection(Section):
    """Synthetic clicks from a known model."""

    kind: Literal["synthetic"] = Field("synthetic", description="where the clicks come from")
    rows: int = Field(2_000_000, ge=100, description="training rows, validation included")
    test_rows: int = Field(100_000, ge=100, description="test rows, drawn separately")
    validation_fraction: float = Field(
        0.05, ge=0, lt=1, description="share of the training rows for validation, the last ones"
    )
    seed: Seed = Field(0, description="seed of the hidden model and the samples")
    scale: float = Field(
        0.01, gt=0, le=1, description="number of ids relative to Criteo Kaggle's 33.8 million"
    )
    zipf: float = Field(1.2, gt=1, le=3, description="exponent of the ids' Zipf distribution")
    numbers_std: float = Field(
        0.4, gt=0, description="standard deviation of the numbers' part of the true logit"
    )
    first_order_std: float = Field(
        1.0,
        gt=0,
        description="standard deviation of the first-order part, the sum of the ids' weights",
    )
    interactions_std: float = Field(
        1.1, gt=0, description="standard deviation of the part from interactions between ids"
    )
    conversions: bool = Field(
        False, description="a second, rarer goal, conversion, that some clicks reach"
    )

    histories: Literal["sum", "mean", "attention", "none"] | None = Field(
        None,
        description="users with histories that decide their clicks, and how the network reads "
        "them, as the schema's key pooling; the keys from scale on do not matter then. null: "
        "Criteo-shaped clicks",
    )

    def clicks(self) -> SyntheticClicks | SyntheticHistories:
        """The hidden model."""
        from stampede.data.synthetic import SyntheticClicks
        from stampede.data.synthetic_histories import SyntheticHistories

        if self.histories is not None:
            return SyntheticHistories(self.seed, self.histories)
        same = {field.name for field in fields(SyntheticClicks)} & type(self).model_fields.keys()
        return SyntheticClicks(**{name: getattr(self, name) for name in same})


class RawSection(ReadingSection, PreparationOptions):
    """A raw log, prepared on first use."""

    written: ClassVar[str] = "data."

    path: str | list[str] = Field(
        "", description="files, plain, .gz or .zst, or globs of them; required"
    )
    cache: str = Field("cache", description="folder for the prepared form")
    spark: str | None = Field(
        None,
        description="prepare the log on Spark's master, such as local[4] or spark://HOST:7077, "
        "whose workers see the log and cache under the same paths; null: in one process",
    )
    order_by: Literal["name", "time"] = Field(
        "name",
        description="split: periods. Which file comes first: by name, day_2 before day_10; by the "
        "smallest value of the schema's time among a file's first rows",
    )

    def check_path(self) -> None:
        """Refuse a missing path."""
        _check_given(self.path)

    def paths(self) -> list[str]:
        """All files, globs and URLs that are named."""
        named = [self.path, self.validation_path, self.test_path, getattr(self, "schema_file", "")]
        return [one for each in named for one in ([each] if isinstance(each, str) else each) if one]

    def source(self) -> Source:
        """The log, opened.

        Raises:
            DataError, SettingsError: as `open_source`; or no path is given.
        """
        self.check_path()
        # Polars takes a second to import.
        from stampede.data.sources import open_source

        return open_source(
            self.kind,
            self.path,
            self,
            schema=getattr(self, "schema_file", ""),
            split_hour=getattr(self, "split_hour", None),
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
        description="split `hour` into hour of the day and weekday; false: keep it as an id, as "
        "in the paper; null: split unless features is paper",
    )


class TableSection(RawSection):
    """Any log, described by a schema."""

    kind: Literal["table"] = Field("table", description="where the clicks come from")
    schema_file: str = Field("", description="YAML file that describes the columns; required")


class PreparedSection(ReadingSection):
    """A folder made by `stampede prepare`."""

    kind: Literal["prepared"] = Field("prepared", description="where the clicks come from")
    path: str = Field("", description="the folder; required")
    cache_gb: float | None = Field(
        None,
        gt=0,
        description="with the URL of a larger folder: its rows are fetched shortly before they are "
        "needed, and at most so many 10^9 bytes of them kept on each machine, besides some bytes a "
        "row, such as labels; half of it takes the place of a larger memory_gb in the order of the "
        "rows. null: the folder is copied before training",
    )

    def check_path(self) -> None:
        """Refuse a missing path, and a local folder of which parts would be fetched."""
        _check_given(self.path)
        if self.cache_gb is not None and not stores.is_url(self.path):
            raise SettingsError(
                f"data.cache_gb: data.path={self.path} is on this machine already; delete the key"
            )


def _check_given(path: str | list[str]) -> None:
    if not path:
        raise SettingsError("data.path is not given; write data.path=FILE after the config file")


def _whole(value: Any) -> Any:
    """Accepts `1e10` as a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Rows = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=MOST_ROWS)]


# Training rows from which on the recipe takes a log for large, as a plan does if they are unknown.
LARGE_LOG = 10_000_000


class SizesSection(Section):
    """Table sizes without clicks, for planning (`launch.py --plan`)."""

    kind: Literal["sizes"] = Field("sizes", description="where the clicks come from")
    tables: dict[FieldName, _Rows] = Field(
        {}, description="rows of each id field's table, by the field's name; required"
    )
    ids_per_sample: dict[FieldName, Annotated[float, Field(gt=0)]] = Field(
        {}, description="mean number of ids per sample, by field; default 1"
    )
    share: dict[FieldName, FieldName] = Field(
        {}, description="further fields, and the field of `tables` whose table each uses"
    )
    attention: dict[FieldName, FieldName] = Field(
        {}, description="fields with pooling: attention, and the query of each"
    )
    sequences: dict[FieldName, FieldName] = Field(
        {}, description="fields with pooling: none, and the query of each"
    )
    numbers: int = Field(0, ge=0, description="numeric inputs")
    goals: list[FieldName] = Field(
        [], description="goals, for networks of several; []: a single label"
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
