"""Copies that a run keeps in its folder: its inputs and its network's file.

`inputs/` is a prepared folder without rows: schema, vocabularies and ranges. `network.py` is a copy
of `model.import`, to compare and restore; it is never executed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from stampede.data import DataError
from stampede.data.learning.row_meanings import RowMeanings, row_meanings, vocabulary_fingerprint
from stampede.data.prepared.manifest import (
    LEARNED_FOLDER,
    MANIFEST,
    FieldEntry,
    Manifest,
    read_manifest,
)
from stampede.engine.checkpoint.manifest import DataEntry
from stampede.engine.config import Config
from stampede.engine.config.data import PreparedSection, RawSection
from stampede.engine.config.model import executed_source
from stampede.engine.errors import RunFolderError
from stampede.engine.reading import data_folder
from stampede.engine.results.run_folder import RunFolder
from stampede.files import make_folder, read_file, remove, write_file
from stampede.settings import SettingsError

INPUTS, NETWORK = "inputs", "network.py"

# Names of rows that do not belong to one id.
MISSING, UNSEEN = "<missing>", "<rare or unseen>"


def keep_inputs(config: Config, run: Path, *, replace: bool) -> None:
    """Keep a run's schema, vocabularies and ranges in its folder, as hard links where possible.

    The prepared data may be deleted afterwards. Synthetic clicks have nothing to keep.

    Args:
        replace: whether the run starts from scratch; otherwise existing files stay.

    Raises:
        RunFolderError: they cannot be written.
    """
    if replace:
        remove(run / INPUTS)
    if kept_inputs(run) or not isinstance(config.data, RawSection | PreparedSection):
        return
    folder = data_folder(config)

    def fill(kept: Path) -> None:
        if (folder / LEARNED_FOLDER).is_dir():
            learned = kept / LEARNED_FOLDER
            shutil.copytree(folder / LEARNED_FOLDER, learned, copy_function=_link)
        manifest = read_manifest(folder).model_copy(update={"parts": {}})
        write_file(kept / MANIFEST, manifest.model_dump_json(indent=1))

    make_folder(run / INPUTS, fill, RunFolderError, remedy="set run.dir to another folder")


def _link(source: str, target: str) -> None:
    try:
        # A copied link would lead out of the run folder.
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)


def kept_inputs(run: Path) -> Path | None:
    """The inputs folder that a run kept, or None."""
    return run / INPUTS if (run / INPUTS).is_dir() else None


def inputs_folder(config: Config, run: Path) -> Path | None:
    """The prepared folder, perhaps without rows, of the inputs; None for synthetic clicks.

    Raises:
        RunFolderError: the run kept no inputs, and its prepared data are gone.
    """
    if not isinstance(config.data, RawSection | PreparedSection):
        return None
    try:
        return kept_inputs(run) or own_folder(config, run)
    except (DataError, SettingsError) as failure:
        raise RunFolderError(
            f"{run}: the run kept no vocabularies ({run / INPUTS} is missing), and its prepared "
            f"data are not found: {failure}"
        ) from None


def own_folder(config: Config, run: Path) -> Path:
    """The prepared folder with the data of a run.

    Raises:
        DataError, SettingsError: they are not there.
    """
    try:
        folder = data_folder(config, with_rows=True)
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder; write the path of the prepared data")
        return folder
    except (DataError, SettingsError) as failure:
        given = [getattr(config.data, key, "") for key in ("path", "schema_file", "cache")]
        paths = [one for some in given for one in ([some] if isinstance(some, str) else some)]
        if all(Path(path).is_absolute() for path in paths if path):
            raise
        raise type(failure)(
            f"{failure}\nrelative paths in {RunFolder(run).config_file} are relative to the folder "
            f"where the run was started; this is {Path.cwd()}"
        ) from None


def remedy(kept: Path) -> str:
    """Advice if the folder that `inputs_folder` found is damaged."""
    if kept.name != INPUTS:
        return f"delete {kept} and prepare the data again"
    return (
        f"delete {kept} to use the run's prepared data instead, if they are intact; or train again"
    )


def meanings_of_rows(
    folder: Path | None, sizes: Mapping[str, int], advice: str | None = None
) -> dict[str, RowMeanings]:
    """What the rows of all tables stand for, by field; without a folder, the ids are rows.

    Args:
        sizes: rows of each field's table.
        advice: if the folder is damaged; by default, `remedy`'s.

    Raises:
        DataError: the folder is damaged.
    """
    if folder is None:
        return {name: RowMeanings(FieldEntry(name=name, rows=n)) for name, n in sizes.items()}
    return row_meanings(folder, advice or remedy(folder))


def row_names(kept: Path | None, field: str, rows: int) -> list[str] | range:
    """Ids or edges of buckets, by row; row numbers for hashes and ids that are rows.

    Raises:
        DataError: the folder that `inputs_folder` found is damaged.
    """
    meanings = meanings_of_rows(kept, {field: rows})[field]
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


def check_trained_with(folder: Path, data: DataEntry, model: Path, remedy: str) -> Manifest:
    """Refuse vocabularies and ranges that differ from those that a model was trained with.

    Args:
        folder: a prepared folder, perhaps without rows.
        data: of the checkpoint; without a fingerprint, only sizes are compared.

    Returns:
        The folder's manifest.

    Raises:
        RunFolderError, DataError: they differ, or are damaged.
    """
    manifest = read_manifest(folder, remedy)
    sizes = {one.name: one.rows for one in manifest.fields}
    found = _inputs_in_words(sizes, len(manifest.numbers), manifest.goals)
    wanted = _inputs_in_words(data.vocabulary_sizes, data.numbers, data.goals)
    for here, there in zip_longest(found, wanted, fillvalue="no more fields"):
        if here != there:
            raise DataError(
                f"{folder}: has {here}, where {model} has {there}. Score the raw files, or prepare "
                "them with `stampede apply`"
            )
    expected = data.vocabulary_sha256
    if expected and vocabulary_fingerprint(folder, remedy) != expected:
        raise RunFolderError(
            f"{folder}: these are not the vocabularies that {model} was trained with (their "
            f"SHA-256 differs), so its ids cannot be decoded; {remedy}"
        )
    return manifest


def _inputs_in_words(fields: Mapping[str, int], numbers: int, goals: Sequence[str]) -> list[str]:
    of_fields = (f"{rows:,} rows of the field {name!r}" for name, rows in fields.items())
    return [f"{numbers} numbers", f"the goals {', '.join(goals) or 'none'}", *of_fields]


def keep_network(config: Config, run: Path, *, replace: bool) -> None:
    """Keep a copy of the executed `model.import` file in a run's folder; not its imports.

    Args:
        replace: whether the run starts from scratch; otherwise an existing copy stays.

    Raises:
        TrainingStoppedError: it cannot be written.
    """
    copy, file = run / NETWORK, config.model.import_file
    if file and (replace or not copy.exists()):
        with RunFolder(run).writing():
            write_file(copy, executed_source(file))


def check_executed(config: Config, run: Path) -> None:
    """Refuse to continue if the executed network file is not the one the run kept."""
    if config.model.import_file:
        _check(config.model.import_file, executed_source(config.model.import_file), run / NETWORK)


def check_unexecuted(run: Path, file: object) -> None:
    """Refuse a changed or missing network file before it is executed.

    The run's copy does not replace a missing file, which may import files beside it. Runs without a
    copy are not checked.

    Args:
        file: `model.import` of the run; the check of all keys refuses anything but text.

    Raises:
        RunFolderError: the file differs from the run's copy, or is missing.
    """
    copy = run / NETWORK
    if not isinstance(file, str) or not copy.is_file():
        return
    try:
        found = read_file(Path(file))
    except FileNotFoundError:
        raise RunFolderError(
            f"model.import: {file}, the network of {run}, is missing; the run has a copy, {copy}: "
            "copy it back, and the files it imports beside it"
        ) from None
    except OSError as failure:
        raise RunFolderError(
            f"{file}: cannot be read ({failure.strerror or failure}); check its permissions"
        ) from None
    _check(file, found, copy)


def _check(file: str, found: bytes, copy: Path) -> None:
    if copy.is_file() and read_file(copy) != found:
        raise RunFolderError(
            f"model.import: {file} has changed since {copy.parent} was trained, so its network "
            f"may differ; the original file is {copy}: copy it back, or train from scratch in "
            "another folder"
        )
