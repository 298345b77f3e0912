"""Keys of `stampede prepare`: how to divide a log into parts, learn from it and write it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from stampede.settings import Section, Seed

# What to do with a row that cannot be read: `error` stops, `skip` leaves it out and lists it in a
# file.
OnBadRow = Literal["error", "skip"]

# 440 MB of ids per file for Criteo. A file's checksum is computed while the next is written.
_SHARD_ROWS = 1 << 22


def _as_text(value: Any) -> Any:
    """Turn integers, which YAML reads from values such as 2024, back into text."""
    if isinstance(value, list):
        return [_as_text(one) for one in value]
    return str(value) if type(value) is int else value


_Share = Annotated[float, Field(ge=0, lt=1)]
_Texts = Annotated[list[str], BeforeValidator(_as_text)]


# Keys that only one kind of split reads.
_KEYS_OF_SPLITS = {
    "by_column": ("split_column", "test_values", "test_from", "validation_values"),
    "files": ("test_path", "validation_path"),
}


class Split(Section):
    """How to divide the rows of a log into parts."""

    # What messages write before a key, so that users can copy it.
    written: ClassVar[str] = "--set "

    split: Literal["sequential", "random", "highfreq", "by_column", "files", "periods"] = Field(
        "sequential",
        description="sequential: the last rows are the test part; random: random rows; highfreq: "
        "random rows, and only a field's most frequent ids get their own row; by_column: by the "
        "values of a column; files: by file; periods: all rows are scored, then trained on, as "
        "`stampede incremental` does file by file",
    )
    test_fraction: _Share | None = Field(
        None,
        description="test part's share of all rows; null: with split sequential the last day (1/7 "
        "of Criteo Kaggle, the last file of Criteo 1TB, 1/10 of Avazu and tables), with random "
        "1/10 (Avazu 1/5)",
    )
    validation_fraction: _Share = Field(
        0.1,
        description="validation part's share of the remaining rows: the last ones with split "
        "sequential, else random ones",
    )
    seed: Seed = Field(0, description="seed of random splits")
    keep_ids: int = Field(
        3,
        ge=1,
        description="split highfreq: how many of a field's most frequent ids get their own row",
    )
    split_column: str = Field(
        "", description="split by_column: the column to split by, read as text"
    )
    test_values: _Texts = Field(
        [], description="split by_column: values of that column in the test part"
    )
    test_from: Annotated[str | None, BeforeValidator(_as_text)] = Field(
        None,
        description="split by_column: rows with this value or a larger one are in the test part; "
        "for dates and days. Numbers compare as numbers, other values as text",
    )
    validation_values: _Texts = Field(
        [], description="split by_column: values in the validation part; empty: validation_fraction"
    )
    validation_path: str | list[str] = Field(
        "", description="split files: files of the validation part; empty: validation_fraction"
    )
    test_path: str | list[str] = Field("", description="split files: files of the test part")

    @model_validator(mode="after")
    def _keys_of_the_chosen_split(self) -> Split:
        if self.split == "by_column":
            if not self.split_column:
                raise ValueError(
                    f"split by_column needs split_column; write {self.written}split_column=NAME"
                )
            if not self.test_values and self.test_from is None:
                raise ValueError(
                    "split by_column needs test_values or test_from; write "
                    f"{self.written}test_from=VALUE to test on rows with this or a larger value"
                )
        if self.split == "files" and not self.test_path:
            raise ValueError(
                f"split files needs test_path; write {self.written}test_path=FILE (path then holds "
                "the training files)"
            )
        if self.split == "periods" and self.test_fraction is not None:
            raise ValueError(
                "test_fraction: delete it; split: periods has no test part, as all rows are "
                "scored before they are trained on"
            )
        for split, keys in _KEYS_OF_SPLITS.items():
            if self.split != split and any(getattr(self, key) for key in keys):
                raise ValueError(
                    f"{', '.join(keys)} belong to split: {split}; found split: {self.split}; "
                    f"delete these keys, or write {self.written}split={split}"
                )
        return self

    def needs_counts(self) -> bool:
        """Whether rows must be counted before any of them can be assigned to a part."""
        if self.split == "periods":
            return False
        named = self.validation_values or self.validation_path
        by_share = self.split in ("sequential", "random", "highfreq")
        return by_share or (self.validation_fraction > 0 and not named)


class GrowthOptions(Section):
    """Which new ids get a row in a period, and which ids lose theirs."""

    admission_periods: int = Field(
        7,
        ge=1,
        description="split: periods. A new id gets a row once it occurs min_count times within "
        "this many periods, including the current one",
    )
    max_rows: int | None = Field(
        None,
        ge=1,
        description="split: periods. Largest number of a field's ids with a row; null: no limit. "
        "Beyond it, new ids take the rows of others. A table never gets smaller: a lower limit "
        "than before only stops its growth",
    )
    evict: Literal["lru", "lfu"] = Field(
        "lru",
        description="split: periods. Whose row a new id takes beyond max_rows, among ids absent "
        "from the period. lru: the id not seen for longest; lfu: the id seen least often",
    )


class WritingOptions(Section):
    """How to write prepared data."""

    written: ClassVar[str] = "--set "

    on_bad_row: OnBadRow = Field(
        "error",
        description="what to do with a bad row. error: stop; skip: leave it out and list it in a "
        "file",
    )
    numbers_dtype: Literal["float32", "float16"] = Field(
        "float32", description="type of the numbers on disk"
    )
    shard_rows: int = Field(_SHARD_ROWS, ge=1, description="rows in each file of the prepared data")


class PreparationOptions(WritingOptions, GrowthOptions, Split):
    """How to prepare a log."""

    features: Literal["auto", "paper"] = Field(
        "auto",
        description="how to choose what the schema leaves open. auto: rare ids share a row, "
        "numbers are standardised, after a logarithm if they are skewed, and their quantile bins "
        "are ids, too, as are hour of the day and weekday; paper: every id has a row, numbers are "
        "scaled to [0, 1]",
    )
    min_count: int | None = Field(
        None,
        ge=1,
        lt=2**62,
        description="ids of the training part that are rarer share a row, in fields for which the "
        "schema says nothing; null: by features and the number of training rows",
    )
    period_before: str = Field(
        "",
        description="split: periods. Prepared folder of the previous period, or its copy in a "
        "run's `inputs/`: its ids keep their rows; empty: this is the first period",
    )
    counts_gb: float = Field(
        2.0, gt=0, description="memory for counting ids, in 10^9 bytes; the rest goes to disk"
    )
    spool: bool = Field(
        True,
        description="keep the parsed rows on disk between the two passes, beside the result: 0.6 "
        "of the log's size for Criteo, more than all of it with many ids in a cell; false: parse "
        "the log twice",
    )
