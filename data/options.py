"""Keys of a preparation: how a log is divided into parts, and how it is written."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from stampede.data.errors import OnBadRow
from stampede.settings import Section, Seed

# Criteo: 440 MB of ids in a file. Checksums of whole files are made while the next are written.
_SHARD_ROWS = 1 << 22


def _as_text(value: Any) -> Any:
    """Whole numbers as text; YAML reads them as numbers."""
    if isinstance(value, list):
        return [_as_text(one) for one in value]
    return str(value) if type(value) is int else value


_Share = Annotated[float, Field(ge=0, lt=1)]
_Texts = Annotated[list[str], BeforeValidator(_as_text)]


class Split(Section):
    """How the rows of a log are divided.

    Attributes:
        written: what stands before a key in a message that says how to set it.
    """

    written: ClassVar[str] = "--set "

    split: Literal["sequential", "random", "highfreq", "by_column", "files", "periods"] = Field(
        "sequential",
        description="sequential: the last rows are the test part; random: random rows; highfreq: "
        "random, and only the most frequent ids of a field keep a row; by_column: by the values of "
        "a column; files: by file; periods: all rows are scored, then trained on, as `stampede "
        "incremental` does with file after file",
    )
    test_fraction: _Share | None = Field(
        None,
        description="share of all rows for the test part; null: with split sequential the last "
        "day (1/7 of Criteo Kaggle, the last file of Criteo 1TB, 1/10 of Avazu and tables), with "
        "random 1/10 (Avazu 1/5)",
    )
    validation_fraction: _Share = Field(
        0.1,
        description="share of the remaining rows for the validation part: the last ones with split "
        "sequential, else random ones",
    )
    seed: Seed = Field(0, description="seed that random rows are drawn with")
    keep_ids: int = Field(
        3,
        ge=1,
        description="split highfreq: how many of a field's most frequent ids keep their own row",
    )
    split_column: str = Field(
        "", description="split by_column: the column that decides, read as text"
    )
    test_values: _Texts = Field(
        [], description="split by_column: values of that column in the test part"
    )
    test_from: Annotated[str | None, BeforeValidator(_as_text)] = Field(
        None,
        description="split by_column: this value and all that sort after it, as text, are in the "
        "test part; for dates",
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
                    f"{self.written}test_from=VALUE, from which on rows are in the test part"
                )
        elif self.split_column or self.test_values or self.test_from or self.validation_values:
            raise ValueError(
                "split_column, test_values, test_from and validation_values belong to "
                f"split: by_column; found split: {self.split}"
            )
        if self.split == "files" and not self.test_path:
            raise ValueError(
                f"split files needs test_path; write {self.written}test_path=FILE (path then holds "
                "the training files)"
            )
        if self.split == "periods" and self.test_fraction is not None:
            raise ValueError(
                "test_fraction does not go with split: periods, which has no test part: all rows "
                "are scored before they are trained on; leave it out"
            )
        if self.split != "files" and (self.test_path or self.validation_path):
            raise ValueError(
                f"test_path and validation_path belong to split: files; found split: {self.split}"
            )
        return self

    def needs_counts(self) -> bool:
        """Whether rows must be counted before the first one can be given a part."""
        if self.split == "periods":
            return False
        named = self.validation_values or self.validation_path
        by_share = self.split in ("sequential", "random", "highfreq")
        return by_share or (self.validation_fraction > 0 and not named)


class GrowthOptions(Section):
    """Which new ids get a row in a period, and which rows are given up for them."""

    admission_periods: int = Field(
        7,
        ge=1,
        description="split: periods. A new id gets a row once it occurs min_count times within "
        "so many periods, the current one included",
    )
    max_rows: int | None = Field(
        None,
        ge=1,
        description="split: periods. Most ids of a field that have a row; null: no limit. "
        "Beyond it new ids take the rows of others. A table never gets smaller: a lower limit "
        "than before only stops its growth",
    )
    evict: Literal["lru", "lfu"] = Field(
        "lru",
        description="split: periods. Whose row a new id takes beyond max_rows, among ids that "
        "the period lacks: lru: of the id not seen for longest; lfu: of the one seen least often",
    )


class WritingOptions(Section):
    """How prepared data are written.

    Attributes:
        written: what a user writes before a key to set it.
    """

    written: ClassVar[str] = "--set "

    on_bad_row: OnBadRow = Field(
        "error",
        description="what a row that cannot be read does. error: stop; skip: leave it out and list "
        "it in a file",
    )
    numbers_dtype: Literal["float32", "float16"] = Field(
        "float32", description="type of the numbers on disk"
    )
    shard_rows: int = Field(_SHARD_ROWS, ge=1, description="rows in each file of the prepared data")


class PreparationOptions(WritingOptions, GrowthOptions, Split):
    """How a log is prepared."""

    features: Literal["auto", "paper"] = Field(
        "auto",
        description="what the schema leaves open. auto: ids seen once share a row, numbers are "
        "standardised, their logarithm where they are skewed, with their quantile bins as ids "
        "besides, hour of the day and weekday of times; paper: a row for each id, numbers from 0 "
        "to 1",
    )
    period_before: str = Field(
        "",
        description="split: periods. Prepared folder of the period before, perhaps without rows, "
        "as a run keeps in `inputs/`: its ids keep their rows; empty: this is the first period",
    )
    counts_gb: float = Field(
        2.0, gt=0, description="memory for counting ids, in 10^9 bytes; counts beyond it go to disk"
    )
    spool: bool = Field(
        True,
        description="keep the parsed rows on disk between the two passes, beside the result, about "
        "half the size of the plain log; false: parse the log twice",
    )
