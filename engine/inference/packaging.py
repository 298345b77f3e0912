"""A folder that holds all that scoring needs, and a loader that needs no stampede."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import polars as pl
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm.auto import tqdm

from stampede.data import formulas
from stampede.data.learning.row_meanings import row_meanings
from stampede.engine.errors import RunFolderError
from stampede.engine.inference.dense_part import export_dense_part
from stampede.engine.inference.description import described_inputs
from stampede.engine.inference.inputs import inputs_folder, remedy
from stampede.engine.inference.model import dense_model
from stampede.engine.inference.row_types import RowType, stored_rows
from stampede.engine.inference.trained import Trained
from stampede.engine.tables import read_stored_field
from stampede.files import hidden, make_folder, publish_folder, to_json

PACKAGE = "package.json"

_LOADER = Path(__file__).parent / "package"
_FORMAT = 1

# Bytes that a file system takes.
_LONGEST_NAME = 255


def export(trained: Trained, folder: Path, rows: RowType, overwrite: bool) -> None:
    """Write a package; it appears when it is whole.

    `package.json` says what the inputs are, `dense.pt2` is the dense part, `tables/` and
    `vocabularies/` have a file for each field, and `load.py` is the loader.

    Args:
        trained: the model.
        folder: a new one.
        rows: how tables are stored, see `stored_rows`.
        overwrite: whether an existing package is replaced.

    Raises:
        RunFolderError: the folder is there or cannot be written, or the run cannot be used.
    """
    # The working folder has no name, and a link could not be replaced.
    folder = folder.resolve()
    _check_folder(folder, overwrite)
    fresh = hidden(folder, "new") if folder.exists() else folder
    if fresh != folder:
        shutil.rmtree(fresh, ignore_errors=True)
    make_folder(fresh, lambda unfinished: _fill(unfinished, trained, rows), RunFolderError)
    if fresh != folder:
        try:
            publish_folder(fresh, folder)
        except OSError as failure:
            shutil.rmtree(fresh, ignore_errors=True)
            raise RunFolderError(
                f"{folder}: cannot be replaced ({failure.strerror or failure}); choose another "
                "folder"
            ) from None


def _check_folder(folder: Path, overwrite: bool) -> None:
    room = _LONGEST_NAME - len("...new.unfinished")
    if len(os.fsencode(folder.name)) > room:
        raise RunFolderError(
            f"{folder}: the name is too long; write one of at most {room} characters"
        )
    if not folder.exists():
        return
    if not overwrite:
        raise RunFolderError(f"{folder}: is there already; write --overwrite, or another folder")
    if not (folder / PACKAGE).is_file():
        raise RunFolderError(
            f"{folder}: is no exported package ({PACKAGE} is absent) and is left alone; write "
            "another folder"
        )


def _fill(folder: Path, trained: Trained, rows: RowType) -> None:
    kept = inputs_folder(trained.config, trained.run)
    about = {
        "format": _FORMAT,
        "stampede": metadata.version("stampede"),
        "torch": torch.__version__,
        "checkpoint": str(trained.checkpoint),
        "epoch": trained.epoch,
        "network": trained.config.model.name,
        "dim": trained.config.model.dim,
        # The dense part multiplies the tables' first-order weights by it.
        "first_order_scale": trained.config.model.first_order_scale,
        "rows": rows,
        **described_inputs(trained, kept),
    }
    (folder / PACKAGE).write_text(to_json(about, indent=1) + "\n", encoding="utf-8")
    for source in (*_LOADER.glob("*.py"), Path(formulas.__file__)):
        (folder / source.name).write_bytes(source.read_bytes())
    dense = io.BytesIO()
    # Into a file it would be written by C++, which has an error of its own for a full disk.
    torch.export.save(export_dense_part(dense_model(trained)), dense)
    (folder / "dense.pt2").write_bytes(dense.getbuffer())
    _write_vocabularies(folder / "vocabularies", kept)
    _write_tables(folder / "tables", trained, rows, about)


def _write_vocabularies(folder: Path, kept: Path | None) -> None:
    folder.mkdir()
    if kept is None:
        return
    for name, meanings in row_meanings(kept, remedy(kept)).items():
        if meanings.values is None:
            continue
        # One vocabulary after the other: the largest alone must fit into memory.
        values = meanings.values().to_frame()
        with _os_errors():
            values.write_parquet(folder / f"{name}.parquet")


def _write_tables(folder: Path, trained: Trained, rows: RowType, about: Mapping[str, Any]) -> None:
    folder.mkdir()
    # One table after the other: the largest alone must fit into memory.
    for field in tqdm(about["fields"], "exporting tables", unit=" tables", delay=1):
        name = field["name"]
        tensors = stored_rows(read_stored_field(trained.checkpoint, name), rows, name)
        path = folder / f"{name}.safetensors"
        with _os_errors():
            save_file(tensors, path)
        # It is made for its owner only.
        shutil.copymode(folder.parent / PACKAGE, path)


@contextmanager
def _os_errors() -> Iterator[None]:
    """Raise as OSError what libraries in Rust say of the system."""
    try:
        yield
    except (SafetensorError, pl.exceptions.PolarsError) as failure:
        found = re.search(r"os error (\d+)", str(failure))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number) if found else str(failure)) from None
