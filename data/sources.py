"""Raw logs by kind: their schema, their files, and how they are divided by default."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stampede.data.errors import DataError
from stampede.data.raw import RawLog, expand
from stampede.data.schema import CRITEO, avazu, load_schema
from stampede.data.schema.features import Features, with_features
from stampede.data.splits import TEST, TRAIN, VALIDATION, Split
from stampede.settings import SettingsError

Kind = Literal["criteo_kaggle", "criteo_1tb", "avazu", "table"]

# Share of the test part by kind of split. Criteo Kaggle has seven days, Avazu ten; the random
# shares are those of the paper. Criteo 1TB is tested on its last file, a day.
LAST_FILE = "last file"
_TEST_SHARES: dict[str, dict[str, float | str]] = {
    "criteo_kaggle": {"sequential": 1 / 7, "random": 0.1},
    "criteo_1tb": {"sequential": LAST_FILE, "random": 0.1},
    "avazu": {"sequential": 0.1, "random": 0.2},
    "table": {"sequential": 0.1, "random": 0.1},
}

# Files count by their content, not by their names.
_KEYS_OF_THE_SPLIT = sorted(set(Split.model_fields) - {"validation_path", "test_path"})

_PROBES, _PROBE_BYTES = 16, 1 << 16


@dataclass(frozen=True)
class Source:
    """A raw log and its division.

    Attributes:
        log: its rows.
        split: the division.
        test_share: share of the test part where the split has none, or `LAST_FILE`.
        file_parts: part of each file, where files decide.
    """

    log: RawLog
    split: Split
    test_share: float | str
    file_parts: Sequence[int] | None

    def described(self) -> dict[str, Any]:
        """All that the prepared data depend on besides the content of the files."""
        return {
            "schema": self.log.schema.model_dump(mode="json"),
            "split": {name: getattr(self.split, name) for name in _KEYS_OF_THE_SPLIT},
            "test_share": self.test_share,
            "file_parts": self.file_parts,
        }


def open_source(
    kind: Kind,
    path: str | Sequence[str],
    split: Split,
    *,
    schema: str = "",
    split_hour: bool | None = None,
    features: Features = "auto",
) -> Source:
    """A raw log.

    Args:
        kind: `table` is any log, described by a schema file.
        path: files or globs; with `split: files` those of the training part.
        split: how to divide it.
        schema: a schema file; for `table`.
        split_hour: make hour of the day and weekday of Avazu's `hour`; None: as `features` does.
        features: what becomes of what the schema leaves open, see `stampede.data.schema.features`.

    Raises:
        DataError: a file is absent.
        SettingsError: the schema cannot be used.
    """
    if kind == "table" and not schema:
        raise SettingsError(
            "a table needs a schema file that says what its columns mean; write data.schema_file, "
            "or --schema"
        )
    if kind == "table":
        meaning = load_schema(Path(schema))
    else:
        by_default = features == "auto"
        meaning = CRITEO
        if kind == "avazu":
            meaning = avazu(by_default if split_hour is None else split_hour)
    files, parts = expand(path), None
    if split.split == "files":
        groups = {TRAIN: files}
        if split.validation_path:
            groups[VALIDATION] = expand(split.validation_path)
        groups[TEST] = expand(split.test_path)
        files = [file for group in groups.values() for file in group]
        parts = [part for part, group in groups.items() for _ in group]
        if len(set(files)) != len(files):
            raise SettingsError("path, validation_path and test_path name a file twice")
    by = "sequential" if split.split == "sequential" else "random"
    share = _TEST_SHARES[kind][by]
    if share == LAST_FILE and split.test_fraction is None and len(files) == 1 and parts is None:
        raise SettingsError(
            f"the test part of {kind} is its last file, but {files[0]} is the only one; write a "
            "test_fraction, or another split"
        )
    meaning = with_features(split.adapted(meaning), features)
    log = RawLog(meaning, files, split.split_column or None)
    return Source(log, split, share, parts)


def fingerprint(files: Sequence[Path], described: Mapping[str, Any]) -> str:
    """Name of a preparation: of the files' length, time of change and samples of their content.

    A whole hash of a terabyte would take longer than to train on it.

    Raises:
        DataError: a file cannot be read.
    """
    digest = hashlib.sha256(repr(described).encode())
    for path in files:
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                digest.update(repr((status.st_size, status.st_mtime_ns)).encode())
                for i in range(_PROBES):
                    file.seek(i * max(status.st_size - _PROBE_BYTES, 0) // (_PROBES - 1))
                    digest.update(file.read(_PROBE_BYTES))
        except OSError as failure:
            raise DataError(f"{path}: {failure.strerror or failure}") from None
    return digest.hexdigest()[:20]
