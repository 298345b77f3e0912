"""A raw log to prepare: its kind, schema and files, and how it is split."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stampede import stores
from stampede.data.errors import DataError
from stampede.data.learning.learned import read_saved
from stampede.data.learning.learner import Growth
from stampede.data.options import GrowthOptions, PreparationOptions, Split
from stampede.data.prepared.manifest import LEARNED_FOLDER, TEST, TRAIN, VALIDATION
from stampede.data.raw.files import expand
from stampede.data.raw.log import RawLog
from stampede.data.schema.features import with_features
from stampede.data.schema.schema import CRITEO, Schema, Vocabulary, avazu, load_schema
from stampede.settings import SettingsError

Kind = Literal["criteo_kaggle", "criteo_1tb", "avazu", "table"]

# Default share of the test part, by kind of log and split. Criteo Kaggle has seven days, Avazu
# ten; the random shares are the paper's. The test part of Criteo 1TB is its last file, a day.
LAST_FILE = "last file"
_TEST_SHARES: dict[str, dict[str, float | str]] = {
    "criteo_kaggle": {"sequential": 1 / 7, "random": 0.1},
    "criteo_1tb": {"sequential": LAST_FILE, "random": 0.1},
    "avazu": {"sequential": 0.1, "random": 0.2},
    "table": {"sequential": 0.1, "random": 0.1},
}

# Prepared data depend on the content of the files, not on their names.
_KEYS_OF_THE_SPLIT = sorted(set(Split.model_fields) - {"validation_path", "test_path"})

_PROBES, _PROBE_BYTES = 16, 1 << 16


@dataclass(frozen=True)
class Source:
    """A raw log and its split."""

    log: RawLog
    split: Split
    test_share: float | str  # share of the test part if `split` has none, or `LAST_FILE`
    file_parts: Sequence[int] | None  # part of each file with split `files`
    growth: Growth | None = None  # of the vocabularies with split `periods`

    def described(self) -> dict[str, Any]:
        """All that the prepared data depend on besides the content of the files."""
        growth = {} if self.growth is None else {"growth": self.growth.described()}
        return growth | {
            "schema": self.log.schema.model_dump(mode="json"),
            "split": {name: getattr(self.split, name) for name in _KEYS_OF_THE_SPLIT},
            "test_share": self.test_share,
            "file_parts": self.file_parts,
        }


def open_source(
    kind: Kind,
    path: str | Sequence[str],
    options: PreparationOptions,
    *,
    schema: str = "",
    split_hour: bool | None = None,
) -> Source:
    """Open a raw log.

    Args:
        path: files or globs; with `split: files` those of the training part.
        schema: a schema file; for the kind `table`.
        split_hour: see `avazu`; None: if `features` is `auto`.

    Raises:
        DataError: a file is absent, or `period_before` cannot be used.
        SettingsError: the schema or the split cannot be used.
    """
    if kind == "table":
        if not schema:
            raise SettingsError(
                "a table needs a schema file that says what its columns mean; write "
                "data.schema_file=FILE.yaml, or --schema FILE.yaml"
            )
        meaning = load_schema(stores.fetched(schema))
    elif kind == "avazu":
        meaning = avazu(options.features == "auto" if split_hour is None else split_hour)
    else:
        meaning = CRITEO
    files, parts = expand(path), None
    if options.split == "files":
        paths = ((VALIDATION, options.validation_path), (TEST, options.test_path))
        groups = [(TRAIN, files), *((part, expand(given)) for part, given in paths if given)]
        files = [file for _, group in groups for file in group]
        parts = [part for part, group in groups for _ in group]
        if len(set(files)) != len(files):
            raise SettingsError("path, validation_path and test_path name a file twice")
    share = _TEST_SHARES[kind]["sequential" if options.split == "sequential" else "random"]
    if share == LAST_FILE and options.test_fraction is None and len(files) == 1 and parts is None:
        raise SettingsError(
            f"the test part of {kind} is its last file, but {files[0]} is the only one; write "
            f"{options.written}test_fraction=0.1, or {options.written}split=random"
        )
    if options.split == "highfreq":
        few = {"max_size": options.keep_ids}
        ids = {
            name: field.model_copy(update=few) if isinstance(field, Vocabulary) else field
            for name, field in meaning.ids.items()
        }
        meaning = meaning.model_copy(update={"ids": ids})
    meaning = with_features(meaning, options.features, options.min_count)
    growing = None
    if options.split == "periods":
        growing = _growth(options, options.period_before, meaning)
        if growing.before is not None:
            meaning = growing.before.schema_
    elif options.period_before:
        raise SettingsError(
            f"period_before: belongs to split: periods, found split: {options.split}; write "
            f"{options.written}split=periods"
        )
    log = RawLog(meaning, files, options.split_column or None)
    return Source(log, options, share, parts, growing)


# Keys that may differ between periods: how the files are written, and which new ids get a row.
_OF_FILES = ("format", "separator", "quote", "columns")
_OF_NEW_IDS = ("min_count", "max_size")


def _growth(options: GrowthOptions, folder: str, schema: Schema) -> Growth:
    """How the vocabularies of this period grow, after the prepared folder of the previous one."""
    if not folder:
        return Growth(options)
    learned = Path(folder) / LEARNED_FOLDER
    saved = read_saved(learned, "write another period_before")
    if not saved.period:
        raise DataError(
            f"period_before: {folder} is not a period of a log: it was prepared without split: "
            "periods, so the counts of its rare ids are not known; start from its files instead"
        )
    # The schema of earlier periods with the keys that this period may change.
    was, given = saved.schema_.model_dump(), schema.model_dump()
    was |= {key: given[key] for key in _OF_FILES}
    for kind, key in (("ids", "min_count"), ("numbers", "transform")):
        for name, field in given[kind].items():
            # What a schema leaves open was settled in the first period.
            if key in field and field[key] is None:
                field[key] = was[kind].get(name, {}).get(key)
    for name in given["ids"].keys() & was["ids"].keys():
        field = given["ids"][name]
        was["ids"][name] |= {key: field[key] for key in _OF_NEW_IDS if key in field}
    if was != given:
        raise DataError(
            f"schema: {_difference(was, given)}, and rows of earlier periods would mean something "
            f"else; write it as before (only {', '.join((*_OF_FILES, *_OF_NEW_IDS))} may change), "
            "or start over"
        )
    merged = saved.model_copy(update={"schema_": Schema.model_validate(was)})
    return Growth(options, learned, merged)


def _difference(was: Mapping[str, Any], now: Mapping[str, Any], where: str = "") -> str:
    """The first key that differs."""
    key = next(key for key in {**was, **now} if was.get(key) != now.get(key))
    before, after = was.get(key), now.get(key)
    if isinstance(before, dict) and isinstance(after, dict):
        return _difference(before, after, f"{where}{key}.")
    return f"{where}{key} was {before!r}, now {after!r}"


def fingerprint(files: Sequence[Path], described: Mapping[str, Any]) -> str:
    """Name of a preparation: a hash of the files' sizes, modification times and sampled content.

    Hashing all of a terabyte would take longer than training on it.
    """
    digest = hashlib.sha256(repr(described).encode())
    for path in files:
        try:
            if stores.is_url(path):
                digest.update(stores.identity(path).encode())
                continue
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                digest.update(repr((status.st_size, status.st_mtime_ns)).encode())
                for i in range(_PROBES):
                    file.seek(i * max(status.st_size - _PROBE_BYTES, 0) // (_PROBES - 1))
                    digest.update(file.read(_PROBE_BYTES))
        except OSError as failure:
            raise DataError(f"{path}: {failure.strerror or failure}") from None
    return digest.hexdigest()[:20]
