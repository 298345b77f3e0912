"""What a checkpoint consists of: `manifest.json` in its folder.

The manifest holds also where each tensor lies in the files, which `torch.distributed.checkpoint`
would pickle: nothing that is read from a checkpoint can execute anything.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from stampede.engine.checkpoint.bounds import MOST_BYTES, check_keys, check_text
from stampede.engine.checkpoint.errors import REMEDY, DamagedCheckpointError
from stampede.engine.checkpoint.layout import TensorEntry, check_fits_files
from stampede.engine.checkpoint.parts import check_parts
from stampede.engine.checkpoint.progress import Progress
from stampede.engine.checkpoint.states import Count
from stampede.engine.errors import RunFolderError
from stampede.files import FileEntry, file_size, to_json
from stampede.models import StoredColumns, table_name
from stampede.settings import Section, cut

# A change of layout or meaning raises it. Format 1 lacks the fingerprint of the vocabulary; others
# are refused.
FORMAT = 2

MANIFEST = "manifest.json"

# What the name of a checkpoint's folder begins with.
NAME = re.compile(r"epoch_\d{4,}|step_\d{8,}", re.ASCII)


class TableEntry(Section):
    """A table: its field, its rows, and the columns `[first, one past the last]` of a row."""

    field: str
    rows: Count
    columns: dict[str, Annotated[list[Count], Field(min_length=2, max_length=2)]]


class DataEntry(Section):
    """The data a run was trained on, as far as a run that continues it must have the same.

    Attributes:
        vocabulary_sizes: rows of each field's table, by field.
        vocabulary_sha256: see `stampede.data.Dataset`; None in checkpoints of format 1.
        numbers: of numeric inputs.
        train_rows, test_rows: of the parts.
    """

    vocabulary_sizes: dict[str, Count]
    vocabulary_sha256: Annotated[str, Field(pattern="^[0-9a-f]*$")] | None
    numbers: Count
    train_rows: Count
    test_rows: Count


class Manifest(Section):
    """A whole checkpoint.

    Attributes:
        format: `FORMAT`.
        versions: of stampede, torch and torchrec.
        progress: how far the run had come.
        config: the resolved configuration.
        tables: by name.
        data: what it was trained on.
        world_size: number of processes.
        files: all files with tensors.
        tensors: by name; all of each lies in those files.
    """

    format: Literal[2] = FORMAT
    versions: dict[str, str]
    progress: Progress
    config: dict[str, Any]
    tables: dict[str, TableEntry]
    data: DataEntry
    world_size: Annotated[int, Field(ge=1, lt=2**31)]
    files: list[FileEntry]
    tensors: dict[str, TensorEntry]

    @property
    def first_order_scale(self) -> float:
        """What the run multiplied its first-order term by; 1 before there was such a key."""
        model = self.config.get("model")
        return model.get("first_order_scale", 1.0) if isinstance(model, dict) else 1.0

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Manifest:
        check_keys(self.config)
        scale = self.first_order_scale
        if not (isinstance(scale, int | float) and 0.0 < scale < math.inf):
            raise ValueError(f"config.model.first_order_scale: found {scale!r:.50}")
        check_fits_files(self.tensors, self.files)
        sizes = self.data.vocabulary_sizes
        if {entry.field: entry.rows for entry in self.tables.values()} != sizes:
            raise ValueError("tables: they do not fit data.vocabulary_sizes")
        for name, table in self.tables.items():
            weights = self.tensors.get(weights_key(table.field))
            if name != table_name(table.field) or weights is None:
                raise ValueError(f"tables.{name}: no such table among the tensors")
            if not {"embedding", "padding"} <= table.columns.keys():
                raise ValueError(f"tables.{name}: it lacks the columns of embedding or padding")
            if weights.size != [table.rows, table.columns["padding"][1]]:
                raise ValueError(f"tables.{name}: its tensor is of another size")
            stored = StoredColumns(table.columns["embedding"][1]).names
            if table.columns != {part: list(where) for part, where in stored.items()}:
                raise ValueError(f"tables.{name}: its columns are not those of a stored row")
        return self


def weights_key(field: str) -> str:
    """Name of the tensor with the weights of a field's table."""
    return f"model.{weights_name(field)}"


def weights_name(field: str) -> str:
    """Name of the same tensor in the model."""
    return f"front.ebc.embedding_bags.{table_name(field)}.weight"


def as_text(manifest: Manifest) -> str:
    """The manifest as it is written, with its own checksum."""
    # Once there and back: of numbers that JSON does not know, null is left.
    values = json.loads(to_json(manifest.model_dump(mode="json")))
    text = to_json({**values, "sha256": _digest(values)}, indent=1)
    check_text(text.encode())
    return text


def read_manifest(path: Path, remedy: str = REMEDY) -> Manifest:
    """A checkpoint's manifest, its parts checked to fit together.

    Args:
        remedy: what to do where it is damaged.

    Raises:
        DamagedCheckpointError: it is not as it was written.
        RunFolderError: there is no checkpoint, or one of another format.
    """
    file = path / MANIFEST
    # What has the name of a checkpoint was one once: a checkpoint gets it when it is whole.
    if not file.exists() and not (NAME.fullmatch(path.name) and path.is_dir()):
        raise RunFolderError(
            f"{path} is no checkpoint ({MANIFEST} is absent); write a folder such as "
            "runs/quickstart/checkpoints/epoch_0001"
        )
    try:
        if file_size(file) > MOST_BYTES:
            raise ValueError(f"{MANIFEST} is larger than any")
        text = file.read_bytes()
        check_text(text)
        values = json.loads(text)
        digest = values.pop("sha256", None)
        # The first format had neither a number nor a checksum.
        is_first = digest is None and "format" not in values and "progress" in values
        if not is_first and digest != _digest(values):
            raise ValueError(f"{MANIFEST} is not as it was written")
        if is_first or values["format"] not in (1, FORMAT):
            raise RunFolderError(_other_format(path, values.get("format", 0)))
        check_parts(values, TableEntry)
        # From text, where a list may stand for a tuple and a section for a dataclass.
        text = json.dumps(_migrated(values))
        # Not beside what is made of it once more.
        del values
        return Manifest.model_validate_json(text)
    except ValidationError as failure:
        first = failure.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or MANIFEST
        raise DamagedCheckpointError(_damaged(path, f"{where}: {first['msg']}", remedy)) from None
    except (ValueError, LookupError, AttributeError, TypeError, OSError, RecursionError) as failure:
        raise DamagedCheckpointError(_damaged(path, str(failure).splitlines()[0], remedy)) from None


def _migrated(values: dict[str, Any]) -> dict[str, Any]:
    """The same as this version would have written it."""
    # Older versions took a run that diverged back; this one would stop.
    for gone in ("rollbacks", "dense_fraction"):
        values["progress"].pop(gone, None)
    if values["format"] == FORMAT:
        return values
    return {**values, "format": FORMAT, "data": {**values["data"], "vocabulary_sha256": None}}


def _damaged(path: Path, what: str, remedy: str) -> str:
    # Keys of a manifest from elsewhere are in it.
    what = cut(what).replace("\n", "\\n")
    return f"{path}: damaged checkpoint ({what:.300}); {remedy}"


def _other_format(path: Path, version: object) -> str:
    return (
        f"{path}: a checkpoint of format {version!r:.20}, this version of stampede knows 1 and "
        f"{FORMAT} only; use the version that wrote it, or train anew with another run.name"
    )


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
