"""`manifest.json` of a checkpoint: its contents, and their places in its files.

`torch.distributed.checkpoint` would pickle these; reading JSON cannot execute anything.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from stampede.data import Dataset
from stampede.data.prepared.manifest import Count
from stampede.engine.errors import RunFolderError
from stampede.engine.training.progress import Progress
from stampede.files import MOST_MANIFEST, FileEntry, read_json, to_json
from stampede.models import table_name
from stampede.settings import Section, reading

# Incremented when the layout or its meaning changes.
FORMAT = 2
MANIFEST = "manifest.json"

# Names of checkpoint folders.
NAME = re.compile(r"epoch_\d{4,}|step_\d{8,}", re.ASCII)

# Prefix of the names of table tensors in a model; a process may hold only some of them.
TABLES = "front."

# What to do about a damaged checkpoint of the user's own run.
REMEDY = "delete it to use the previous one"

DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
}


class DamagedCheckpointError(RunFolderError):
    """A checkpoint whose files have changed since they were written."""


class ChunkEntry(Section):
    """A part of a tensor that one process wrote, and its place in a file of `torch.save`."""

    offsets: list[Count]
    sizes: list[Count]
    file: str
    start: Count
    bytes: Count


class TensorEntry(Section):
    """A tensor and the chunks that cover it."""

    dtype: Literal[tuple(DTYPES)]
    size: list[Count]
    chunks: list[ChunkEntry]


class TableEntry(Section):
    """A table: its field, its rows, and the columns `[first, one past the last]` of a row."""

    field: str
    rows: Count
    columns: dict[str, list[Count]]


class DataEntry(Section):
    """What must be the same for a run to continue another; see `stampede.data.Dataset`."""

    vocabulary_sizes: dict[str, Count]
    shared: dict[str, str] = Field(default_factory=dict)
    mean: list[str] = Field(default_factory=list)
    weighted: list[str] = Field(default_factory=list)
    goals: list[str] = Field(default_factory=list)
    attention: dict[str, str] = Field(default_factory=dict)
    sequences: dict[str, str] = Field(default_factory=dict)
    vocabulary_sha256: str
    numbers: Count
    train_rows: Count
    test_rows: Count


class Manifest(Section):
    """A whole checkpoint; `config` is the resolved configuration."""

    format: Literal[2] = FORMAT
    versions: dict[str, str]
    progress: Progress
    config: dict[str, Any]
    tables: dict[str, TableEntry]
    data: DataEntry
    world_size: Annotated[int, Field(ge=1)]
    files: list[FileEntry]
    tensors: dict[str, TensorEntry]

    @property
    def first_order_scale(self) -> float:
        """The factor of the first-order term; 1 in checkpoints older than the key."""
        return self.config.get("model", {}).get("first_order_scale", 1.0)


def weights_name(field: str, tensors: Iterable[str], prefix: str = "") -> str:
    """Name, among those of `tensors`, of the tensor with the weights of a field's table.

    Any name that is not there if there is none, as of a table on other ranks.
    """
    begin, end = f"{prefix}{TABLES}", f".{table_name(field)}.weight"
    found = (name for name in tensors if name.startswith(begin) and name.endswith(end))
    return next(found, f"{begin}{end}")


def data_entry(dataset: Dataset) -> DataEntry:
    """The manifest's entry for the data."""
    return DataEntry(
        vocabulary_sizes=dict(dataset.vocabulary_sizes),
        shared=dict(dataset.shared),
        mean=list(dataset.mean),
        weighted=list(dataset.weighted),
        goals=list(dataset.goals),
        attention=dict(dataset.attention),
        sequences=dict(dataset.sequences),
        vocabulary_sha256=dataset.vocabulary_sha256,
        numbers=dataset.numbers,
        train_rows=dataset.train.rows,
        test_rows=dataset.test.rows,
    )


def versions() -> dict[str, str]:
    """Versions of the libraries that decide how a run continues."""
    return {
        "stampede": metadata.version("stampede"),
        # The installed package's version does not say which build it is.
        "torch": torch.__version__,
        "torchrec": metadata.version("torchrec"),
    }


def as_text(manifest: Manifest) -> str:
    """The manifest's text, with its own checksum."""
    # Through JSON once: numbers that are not finite become null.
    values = json.loads(to_json(manifest.model_dump(mode="json")))
    return to_json({**values, "sha256": _digest(values)}, indent=1)


def read_manifest(path: Path, remedy: str = REMEDY) -> Manifest:
    """A checkpoint's manifest.

    Raises:
        DamagedCheckpointError: it was changed or truncated; `remedy` says what to do.
        RunFolderError: there is no checkpoint, or its format is unknown.
    """
    file = path / MANIFEST
    # A checkpoint gets its name only when it is complete, so this one has lost its manifest.
    if not file.exists() and not (NAME.fullmatch(path.name) and path.is_dir()):
        raise RunFolderError(
            f"{path} is not a checkpoint ({MANIFEST} is missing); write a folder such as "
            "runs/quickstart/checkpoints/epoch_0001"
        )
    with reading(path, DamagedCheckpointError, remedy, "damaged checkpoint"):
        values = read_json(file, MOST_MANIFEST)
        if values.pop("sha256") != _digest(values):
            raise ValueError(f"{MANIFEST} was changed after it was written")
        if values["format"] != FORMAT:
            raise RunFolderError(
                f"{path}: the checkpoint has format {values['format']}, but this version of "
                f"stampede reads only {FORMAT}; use the version that wrote it, or train from "
                "scratch with another run.name"
            )
        # Versions up to 617ec1a2 could compare a loss with earlier ones, and those up to f7ec6225
        # reset tables between epochs.
        for key in ("logged_losses", "tables_epoch"):
            values["progress"].pop(key, None)
        if values["progress"].pop("tables_start", 0):
            raise RunFolderError(
                f"{path}: its tables began again each epoch (optim.embedding.begin_again), which "
                "this version cannot do; continue with commit f7ec6225, or train from scratch with "
                "another run.name"
            )
        # From text, where a list may stand for a tuple and a section for a dataclass.
        return Manifest.model_validate_json(json.dumps(values))


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
