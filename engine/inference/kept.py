"""What a run keeps in its folder for later: its inputs and the file of its network.

`inputs/` is a prepared folder without rows: schema, vocabularies and ranges. `network.py` is a copy
of `model.import`, there to compare and to restore; it is never executed.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from stampede.data import DataError
from stampede.data.learning.row_meanings import row_meanings, vocabulary_fingerprint
from stampede.data.prepared.manifest import LEARNED_FOLDER, MANIFEST, Manifest, read_manifest
from stampede.engine.checkpoint.manifest import DataEntry
from stampede.engine.config import Config
from stampede.engine.config.data import PreparedSection, RawSection
from stampede.engine.config.model import executed_source
from stampede.engine.errors import RunFolderError, TrainingStoppedError
from stampede.engine.reading import data_folder
from stampede.engine.run_folder import RunFolder
from stampede.files import make_folder, read_file, remove, write_file
from stampede.settings import SettingsError, read_yaml

INPUTS, NETWORK = "inputs", "network.py"

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
        # A link would lead out of the run folder.
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)


def kept_inputs(run: Path) -> Path | None:
    """What a run kept of its inputs; None where it kept nothing."""
    return run / INPUTS if (run / INPUTS).is_dir() else None


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
        keys = ("path", "schema_file", "cache", "validation_path", "test_path")
        given = {f"data.{key}": getattr(config.data, key, "") for key in keys}
        relative = [f"{key}: {path}" for key, path in given.items() if _is_relative(path)]
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


def remedy(kept: Path) -> str:
    """What to do where the folder that `inputs_folder` found is damaged."""
    if kept.name.partition(".")[0] != INPUTS:
        return f"delete {kept} and prepare the data again"
    return (
        f"delete {kept} to use the run's prepared data instead, if they are whole; or train again"
    )


def row_names(kept: Path | None, field: str, rows: int) -> list[str] | range:
    """What the rows of a field's table stand for, as far as texts say it.

    Args:
        kept: what `inputs_folder` found.
        field: its name.
        rows: of its table.

    Returns:
        Ids of a vocabulary and edges of buckets; the rows' numbers of ids that are hashed, or rows
        already.

    Raises:
        DataError: the folder is damaged.
    """
    if kept is None:
        return range(rows)
    meanings = row_meanings(kept, remedy(kept))[field]
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
    """Refuse vocabularies and ranges that are not those that a model was trained with.

    Args:
        folder: a prepared folder, perhaps without rows.
        data: of the checkpoint; where they lack the fingerprint, sizes are compared.
        model: the checkpoint, for the message.
        remedy: what to do where the folder is damaged, or another one.

    Returns:
        Manifest of the folder.

    Raises:
        RunFolderError, DataError: they are not, or are damaged.
    """
    manifest = read_manifest(folder, remedy)
    check_same_inputs(manifest, data, folder, model)
    expected = data.vocabulary_sha256
    if expected is not None and vocabulary_fingerprint(folder, remedy) != expected:
        raise RunFolderError(
            f"{folder}: these are not the vocabularies that {model} was trained with (their "
            f"SHA-256 differs), so nobody knows what its ids are; {remedy}"
        )
    return manifest


def check_same_inputs(found: Manifest, data: DataEntry, where: Path, model: Path) -> None:
    """Refuse data whose fields are not those that a model was trained on.

    Args:
        found: of the data that are to be used.
        data: of the checkpoint.
        where: the data, for the message.
        model: the checkpoint, for the message.

    Raises:
        DataError: names the first difference.
    """
    fields = {entry.name: entry.rows for entry in found.fields}
    for name, rows in data.vocabulary_sizes.items():
        if name not in fields:
            has = ", ".join(fields)
            raise DataError(f"{where}: no id field {name!r}, which {model} needs; it has {has}")
        if fields[name] != rows:
            raise DataError(
                f"{where}: the table of {name!r} has {fields[name]:,} rows, but {rows:,} in "
                f"{model}: its vocabulary is another one. Score the raw files, or prepare them "
                "with `stampede apply`"
            )
    if list(fields) != list(data.vocabulary_sizes):
        raise DataError(
            f"{where}: the id fields are {', '.join(fields)}, but in {model} they are "
            f"{', '.join(data.vocabulary_sizes)}"
        )
    if len(found.numbers) != data.numbers:
        raise DataError(f"{where}: {len(found.numbers)} numbers, but {data.numbers} in {model}")


def check_same_vocabularies(found: Manifest, kept: Manifest, where: Path) -> None:
    """Refuse prepared data whose rows of tables mean other ids than those of a run.

    Raises:
        DataError: names the first file that differs.
    """
    ours, theirs = (
        {Path(entry.name).name: entry.sha256 for entry in manifest.learned}
        for manifest in (kept, found)
    )
    differing = sorted(name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name])
    if differing:
        raise DataError(
            f"{where}: its {differing[0]} is not the one that the model was trained with, so its "
            "ids mean something else. Score the raw files, or prepare them with "
            "`stampede apply`"
        )


def keep_network(config: Config, run: Path, *, replace: bool) -> None:
    """Keep what was executed of `model.import` in a run's folder; not what it imports.

    Args:
        replace: whether the run trains anew; else a copy that is there stays.

    Raises:
        TrainingStoppedError: it cannot be written.
    """
    copy, file = run / NETWORK, config.model.import_file
    try:
        if file and (replace or not copy.exists()):
            write_file(copy, executed_source(file))
    except OSError as failure:
        raise TrainingStoppedError(
            f"{copy}: cannot be written ({failure.strerror or failure}); make room there, or set "
            "run.dir to another folder"
        ) from None


def check_executed(config: Config, run: Path) -> None:
    """Refuse to go on with another file than the run was trained with.

    Raises:
        RunFolderError: what was executed is not what the run kept.
    """
    if config.model.import_file:
        _check(config.model.import_file, executed_source(config.model.import_file), run / NETWORK)


def check_unexecuted(run: Path, config_file: Path) -> None:
    """Refuse another file than a run was trained with, before it is executed.

    Where the file is gone the copy does not stand in for it: it may import what lay beside it. Runs
    that kept no copy are not checked.

    Args:
        config_file: the run's.

    Raises:
        RunFolderError: the file is not what the run kept, or gone.
        SettingsError: the configuration cannot be read.
    """
    file, copy = imported_by(config_file), run / NETWORK
    # What is no text is refused where all keys are checked.
    if not file or not isinstance(file, str) or not copy.is_file():
        return
    try:
        found = read_file(Path(file))
    except FileNotFoundError:
        raise RunFolderError(
            f"model.import: {file}, which the network of {run} was made from, is gone; the run has "
            f"a copy, {copy}: copy it there, and what it imports beside it"
        ) from None
    except OSError as failure:
        raise RunFolderError(f"{file}: cannot be read ({failure.strerror or failure})") from None
    _check(file, found, copy)


def imported_by(config_file: Path) -> object:
    """What a configuration says under `model.import`; nothing of it is executed."""
    model = read_yaml(config_file, "a run keeps it in its folder").get("model")
    return model.get("import") if isinstance(model, dict) else None


def _check(file: str, found: bytes, copy: Path) -> None:
    if copy.is_file() and read_file(copy) != found:
        raise RunFolderError(
            f"model.import: {file} is not as it was when {copy.parent} was trained, so its network "
            f"may be another one; what it was is in {copy}: copy that there, or train anew "
            "into another folder"
        )
