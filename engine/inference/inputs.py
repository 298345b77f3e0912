"""What a run learned about its inputs, kept in its folder: schema, vocabularies, ranges."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from stampede.data import DataError
from stampede.data.learning.learned import Learned, Saved, load, read_saved
from stampede.data.learning.row_meanings import row_meanings
from stampede.data.prepared.manifest import LEARNED_FOLDER, MANIFEST, Manifest, read_manifest
from stampede.engine.config import Config
from stampede.engine.config.data import PreparedSection, RawSection
from stampede.engine.datasets import data_folder
from stampede.engine.errors import RunFolderError
from stampede.engine.run_folder import RunFolder
from stampede.settings import SettingsError

# In the run folder: a prepared folder without rows.
INPUTS = "inputs"

# Rows of a table that are no id's own.
MISSING, UNSEEN = "<missing>", "<rare or unseen>"


def keep_inputs(config: Config, run: Path, *, replace: bool) -> None:
    """Keep a run's schema, vocabularies and ranges in its folder.

    The prepared data may be deleted afterwards. Synthetic clicks have nothing to keep. The files
    are linked where the file system can, which takes no space.

    Args:
        replace: whether the run trains anew; else what is there stays.

    Raises:
        RunFolderError: they cannot be written.
    """
    kept = run / INPUTS
    if replace:
        shutil.rmtree(kept, ignore_errors=True)
    if not isinstance(config.data, RawSection | PreparedSection):
        return
    if kept.exists():
        return
    folder = data_folder(config)
    unfinished = run / f".{INPUTS}.tmp"
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        if (folder / LEARNED_FOLDER).is_dir():
            shutil.copytree(
                folder / LEARNED_FOLDER, unfinished / LEARNED_FOLDER, copy_function=_link
            )
        manifest = read_manifest(folder).model_copy(update={"parts": {}})
        (unfinished / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
        os.replace(unfinished, kept)
    except OSError as failure:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise RunFolderError(
            f"{kept}: cannot be written ({failure.strerror or failure}); make room there, or set "
            "run.dir to another folder"
        ) from None


def kept_inputs(run: Path) -> Path | None:
    """What a run kept of its inputs; None where it kept nothing."""
    return run / INPUTS if (run / INPUTS).is_dir() else None


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def inputs_folder(config: Config, run: Path) -> Path | None:
    """The prepared folder, perhaps without rows, that says what a run's inputs are.

    Returns:
        None for a run on synthetic clicks.

    Raises:
        RunFolderError: the run is older than this and its prepared data are gone.
    """
    if not isinstance(config.data, RawSection | PreparedSection):
        return None
    kept = kept_inputs(run)
    if kept is not None:
        return kept
    try:
        return own_folder(config, run)
    except (DataError, SettingsError) as failure:
        raise RunFolderError(
            f"{run}: the vocabularies of the run were not kept in it ({run / INPUTS} is absent) "
            f"and its prepared data are not found either: {failure}"
        ) from None


def own_folder(config: Config, run: Path) -> Path:
    """The prepared folder with the data of a run.

    Raises:
        DataError, SettingsError: they are not there.
    """
    try:
        folder = data_folder(config)
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder; write where the prepared data are")
        return folder
    except (DataError, SettingsError) as failure:
        data = config.data
        keys = {"path": data.path} | {
            key: getattr(data, key, "")
            for key in ("schema_file", "cache", "validation_path", "test_path")
        }
        relative = [f"data.{key}: {path}" for key, path in keys.items() if _is_relative(path)]
        if not relative:
            raise
        raise type(failure)(
            f"{failure}\n{RunFolder(run).config_file} has paths that are relative to the folder "
            f"where the run was started ({', '.join(relative)}), and this is {Path.cwd()}; run the "
            "command there"
        ) from None


def _is_relative(path: str | list[str]) -> bool:
    paths = [path] if isinstance(path, str) else path
    return any(path and not Path(path).is_absolute() for path in paths)


def read_learned(kept: Path, manifest: Manifest) -> Learned | None:
    """What turns raw rows into inputs; None where nobody knows, as of imported arrays.

    Args:
        manifest: of what `inputs_folder` found.

    Raises:
        DataError: it is damaged.
    """
    learned = kept / LEARNED_FOLDER
    return load(learned, remedy(kept), manifest.fields) if learned.is_dir() else None


def row_names(trained_inputs: Path | None, field: str, rows: int) -> list[str] | range:
    """What the rows of a field's table stand for, as far as texts say it.

    Args:
        trained_inputs: what `inputs_folder` found.
        field: its name.
        rows: of its table.

    Returns:
        Ids of a vocabulary and edges of buckets; the rows' numbers of ids that are hashed, or rows
        already.

    Raises:
        DataError: the folder is damaged.
    """
    if trained_inputs is None:
        return range(rows)
    meanings = row_meanings(trained_inputs, remedy(trained_inputs))[field]
    if meanings.values is not None:
        names = ["", "", *meanings.values().to_list()]
    elif meanings.edges:
        names = ["", *(f"{low:g} to {high:g}" for low, high in meanings.buckets)]
    else:
        return range(rows)
    for row, name in ((meanings.entry.missing_row, MISSING), (meanings.entry.unseen_row, UNSEEN)):
        if row is not None:
            names[row] = name
    return names


def read_kept_saved(kept: Path) -> Saved | None:
    """What `read_learned` is made of.

    Raises:
        DataError: it is damaged.
    """
    learned = kept / LEARNED_FOLDER
    return read_saved(learned, remedy(kept)) if learned.is_dir() else None


def remedy(kept: Path) -> str:
    """What to do where the folder that `inputs_folder` found is damaged."""
    if kept.name.partition(".")[0] != INPUTS:
        return f"delete {kept} and prepare the data again"
    return (
        f"delete {kept} to use the run's prepared data instead, if they are whole; or train again"
    )
