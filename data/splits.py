"""Which part of a data set each row of a log belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import polars as pl
from pydantic import BeforeValidator, Field, model_validator

from stampede.data.permutation import Permutation
from stampede.data.prepared.manifest import PARTS
from stampede.data.raw.log import Chunk
from stampede.data.raw.typed import SPLIT
from stampede.data.schema import Schema
from stampede.data.schema.columns import Vocabulary
from stampede.settings import Section, Seed

TRAIN, VALIDATION, TEST = range(len(PARTS))


def _as_text(value: Any) -> Any:
    """A whole number as it was written."""
    if isinstance(value, list):
        return [_as_text(one) for one in value]
    return str(value) if type(value) is int else value


_Share = Annotated[float, Field(ge=0, lt=1)]


class Split(Section):
    """How the rows of a log are divided.

    Attributes:
        written: what a user writes before a key to set it.
    """

    written: ClassVar[str] = "--set "

    split: Literal["sequential", "random", "highfreq", "by_column", "files"] = Field(
        "sequential",
        description="sequential: the last rows are the test part; random: random rows; highfreq: "
        "random, and only the most frequent ids of a field keep a row; by_column: by the values of "
        "a column; files: by file",
    )
    test_fraction: _Share | None = Field(
        None,
        description="share of all rows for the test part; none: sequential the last day (1/7 of "
        "Criteo Kaggle, the last file of Criteo 1TB, 1/10 of Avazu and tables), random 1/10 (Avazu "
        "1/5)",
    )
    validation_fraction: _Share = Field(
        0.1,
        description="share of the other rows for validation: the last ones if sequential, else "
        "random ones",
    )
    seed: Seed = Field(0, description="seed of random rows")
    keep_ids: int = Field(
        3, ge=1, description="ids of a field that keep a row of their own; highfreq only"
    )
    split_column: str = Field("", description="column that by_column looks at, as text")
    test_values: Annotated[list[str], BeforeValidator(_as_text)] = Field(
        [], description="its values in the test part"
    )
    test_from: Annotated[str | None, BeforeValidator(_as_text)] = Field(
        None,
        description="its values from here on are in the test part, in the order of text; for dates",
    )
    validation_values: Annotated[list[str], BeforeValidator(_as_text)] = Field(
        [], description="its values in the validation part; none: validation_fraction"
    )
    validation_path: str | list[str] = Field(
        "", description="files of the validation part; none: validation_fraction; split: files only"
    )
    test_path: str | list[str] = Field("", description="files of the test part; split: files only")

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
        if self.split != "files" and (self.test_path or self.validation_path):
            raise ValueError(
                f"test_path and validation_path belong to split: files; found split: {self.split}"
            )
        return self

    def adapted(self, schema: Schema) -> Schema:
        """The schema; `highfreq` leaves few ids in its vocabularies."""
        if self.split != "highfreq":
            return schema
        ids = {
            name: field.model_copy(update={"max_size": self.keep_ids})
            if isinstance(field, Vocabulary)
            else field
            for name, field in schema.ids.items()
        }
        return schema.model_copy(update={"ids": ids})

    def needs_counts(self) -> bool:
        """Whether the number of rows has to be known before the first is assigned."""
        by_share = self.split in ("sequential", "random", "highfreq")
        return by_share or (self.validation_fraction > 0 and not self.validation_given())

    def validation_given(self) -> bool:
        """Whether the validation part is named, not a share."""
        return bool(self.validation_values or self.validation_path)


@dataclass(frozen=True)
class Assignment:
    """The part of each row.

    Attributes:
        split: the division.
        counts: rows of each file, where `split.needs_counts()`.
        test_share: share of the test part where the split has none; `last file` is that file.
        file_parts: part of each file; None where files do not decide.
    """

    split: Split
    counts: Sequence[int] | None
    test_share: float | str
    file_parts: Sequence[int] | None = None

    def rows(self, chunk: Chunk) -> np.ndarray:
        """Number of each row in the whole log: `[n]` int64. Needs the counts."""
        return chunk.numbers + sum(self.counts[: chunk.file])

    def parts(self, chunk: Chunk) -> np.ndarray:
        """`TRAIN`, `VALIDATION` or `TEST` for each row of a chunk: `[n]` int8."""
        kind = self.split.split
        if kind == "sequential":
            train, validation, _ = self._sizes()
            return np.digitize(self.rows(chunk), [train, train + validation]).astype(np.int8)
        if kind in ("random", "highfreq"):
            _, validation, test = self._sizes()
            place = self._shuffled(chunk)
            return np.where(
                place < test, TEST, np.where(place < test + validation, VALIDATION, TRAIN)
            ).astype(np.int8)
        if kind == "files":
            parts = np.full(len(chunk.numbers), self.file_parts[chunk.file], dtype=np.int8)
        else:
            parts = self._by_column(chunk.frame[SPLIT])
        if self.split.needs_counts():
            held = self._shuffled(chunk) < int(self.split.validation_fraction * self._total())
            parts[(parts == TRAIN) & held] = VALIDATION
        return parts

    def _by_column(self, values: pl.Series) -> np.ndarray:
        split = self.split
        if values.null_count() and split.test_from is not None:
            values = values.fill_null("")
        test = values.is_in(split.test_values).fill_null(False)
        if split.test_from is not None:
            test = test | (values >= split.test_from)
        validation = values.is_in(split.validation_values).fill_null(False)
        parts = np.where(test.to_numpy(), TEST, np.where(validation.to_numpy(), VALIDATION, TRAIN))
        return parts.astype(np.int8)

    def _total(self) -> int:
        """Rows that random numbers are drawn for; of `files`, those of the training files."""
        if self.file_parts is None:
            return sum(self.counts)
        return sum(
            count for count, part in zip(self.counts, self.file_parts, strict=True) if part == TRAIN
        )

    def _sizes(self) -> tuple[int, int, int]:
        """Rows of training, validation and test part."""
        rows = self._total()
        share = self.test_share if self.split.test_fraction is None else self.split.test_fraction
        if share == "last file":
            trained = rows - self.counts[-1]
        elif self.split.split == "sequential":
            trained = int((1 - share) * rows)
        else:
            trained = rows - int(share * rows)
        validation = int(self.split.validation_fraction * trained)
        return trained - validation, validation, rows - trained

    def _shuffled(self, chunk: Chunk) -> np.ndarray:
        """A random place for each row, all different."""
        total = self._total()
        rows = self.rows(chunk)
        within = rows < total
        places = np.full(len(rows), total, dtype=np.int64)
        places[within] = Permutation(total, (self.split.seed,))(rows[within])
        return places
