"""Exports what has changed in a model since an earlier package; `update.py` applies it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import torch
from safetensors.torch import load_file
from torch import Tensor

from stampede.engine.errors import RunFolderError
from stampede.engine.inference.package import update
from stampede.engine.inference.package.update import PACKAGE
from stampede.engine.inference.packaging import export, save
from stampede.engine.inference.trained import Trained
from stampede.files import make_folder, to_json


class Delta(NamedTuple):
    """Sizes of a delta."""

    rows: int  # of all tables after the update
    changed: int  # rows that are new or have new values
    ids: int  # lines of vocabularies that are new or have new ids


def export_delta(trained: Trained, base: Path, folder: Path, tolerance: float = 0.0) -> Delta:
    """Write the differences from a package; the folder appears once it is complete.

    `delta.json` identifies the base package; `package.json` describes the updated package.
    `changes/` holds the changed rows of tables and ids of vocabularies. The dense part is complete.

    Args:
        base: a package made by `export` or `update.py`; tables are stored as in it.
        tolerance: a row is unchanged if no value moved by more than this.

    Raises:
        RunFolderError: the base is not a package or has other fields, or the folder exists or
            cannot be written.
    """
    try:
        before = update.load.checked(base)
    except ValueError as failure:
        raise RunFolderError(
            f"{failure}; write a package made by `stampede export` or update.py"
        ) from None
    found: list[Delta] = []

    def fill(unfinished: Path) -> None:
        # Inside the unfinished folder, so that a killed process leaves nothing else behind.
        whole, made = unfinished / "whole", unfinished / "made"
        export(trained, whole, before["rows"], overwrite=False)
        after = update.load.read_about(whole)
        why = _incomparable(before, after)
        if why:
            raise RunFolderError(f"{base}: {why}; export a full package once")
        found.append(_write_changes(base, whole, unfinished, list(after["files"]), tolerance))
        try:
            # Apply the delta as a server will. With a tolerance, the result differs from a full
            # export and gets its own description.
            update.patch(base, unfinished, made, checked=tolerance == 0.0)
        except ValueError as failure:
            raise RunFolderError(
                f"the delta would not reproduce a full export ({failure}); export a full package "
                "once"
            ) from None
        shutil.copyfile(made / PACKAGE, unfinished / PACKAGE)
        for done in (whole, made):
            shutil.rmtree(done)

    if not make_folder(folder, fill, RunFolderError):
        raise RunFolderError(f"{folder}: already exists; write another folder")
    return found[0]


def _incomparable(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Why there can be no delta between two packages; empty if there can."""
    names = [[field["name"] for field in about["fields"]] for about in (before, after)]
    if names[0] != names[1]:
        return "its fields differ from the model's"
    for name, entry in after["files"].items():
        if name.endswith(".py") and before["files"].get(name) != entry:
            return (
                f"its {name} is from another version of stampede, and a delta does not update "
                "programs"
            )
    return ""


def _write_changes(
    base: Path, whole: Path, delta: Path, names: list[str], tolerance: float
) -> Delta:
    rows = changed_rows = changed_ids = 0
    tables, vocabularies, sizes = {}, {}, {}
    (delta / "changes").mkdir()
    for name in names:
        kind, _, file = name.partition("/")
        if kind == "tables":
            old, new = load_file(base / name), load_file(whole / name)
            changed = _changed(old, new, tolerance)
            rows, changed_rows = rows + len(new["first_order"]), changed_rows + len(changed)
            values = {key: tensor[changed].contiguous() for key, tensor in new.items()}
            size = torch.tensor(len(new["first_order"]))
            tables[name] = f"changes/{file}"
            save({**values, "rows": changed, "size": size}, delta / tables[name])
        elif kind == "vocabularies":
            old, new = (pl.read_parquet(one / name, glob=False)["value"] for one in (base, whole))
            lines = _changed_lines(old, new)
            changed_ids, sizes[name] = changed_ids + len(lines), len(new)
            vocabularies[name] = f"changes/{file}"
            save(lines, delta / vocabularies[name])
        elif not name.endswith(".py"):
            shutil.copyfile(whole / name, delta / name)
    about = {
        "format": update.FORMAT,
        "base": update.package_digest(base),
        "tables": tables,
        "vocabularies": vocabularies,
        "sizes": sizes,
    }
    (delta / update.DELTA).write_text(to_json(about, indent=1), encoding="utf-8")
    shutil.copyfile(whole / PACKAGE, delta / PACKAGE)
    return Delta(rows, changed_rows, changed_ids)


def _changed(old: dict[str, Tensor], new: dict[str, Tensor], tolerance: float) -> Tensor:
    """Rows of a table that moved by more than a tolerance or are new, `[n]` int64."""
    size, common = len(new["first_order"]), min(len(new["first_order"]), len(old["first_order"]))
    moved = torch.ones(size, dtype=torch.bool)
    if tolerance:
        then, now = (update.load.looked_up(table, slice(common)) for table in (old, new))
        moved[:common] = (now - then).abs().amax(1) > tolerance
        return moved.nonzero().squeeze(1)
    moved[:common] = False
    for name, tensor in new.items():
        # Bits, as minus zero equals zero.
        bits = [t[:common].contiguous().view(torch.uint8) for t in (old[name], tensor)]
        moved[:common] |= (bits[0] != bits[1]).view(common, -1).any(1)
    return moved.nonzero().squeeze(1)


def _changed_lines(old: pl.Series, new: pl.Series) -> pl.DataFrame:
    """Lines of a vocabulary that are new or hold a new id."""
    lines = new.to_frame().with_row_index("line")
    then = pl.concat([old, pl.Series("value", [None] * max(0, len(new) - len(old)), pl.String)])
    return lines.filter(then.head(len(new)).ne_missing(new))
