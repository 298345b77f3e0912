"""What a run learned about its inputs, kept in its folder: schema, vocabularies, ranges."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from stampede.data import DataError
from stampede.data.learning import Learned
from stampede.data.learning.learned import Saved, load, read_saved
from stampede.data.prepared.manifest import MANIFEST, Manifest, read_manifest
from stampede.data.vocabulary_fingerprint import vocabulary_fingerprint
from stampede.data.writing import LEARNED_FOLDER
from stampede.engine.config import Config
from stampede.engine.config.data import PreparedSection, RawSection
from stampede.engine.datasets import data_folder
from stampede.engine.errors import RunFolderError
from stampede.engine.run_folder import RunFolder
from stampede.settings import SettingsError

# In the run folder: a prepared folder without rows.
INPUTS = "inputs"


def keep_inputs(config: Config, run: Path, *, replace: bool) -> None:
    """Keep a run's schema, vocabularies and ranges in its folder.

    The prepared data may be deleted afterwards. Synthetic clicks have nothing to keep. The files
    are linked where the file system can, which takes no space. Where `checkpoint.force` lets a run
    go on with another vocabulary, the one before stays beside it for the checkpoints of before.

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
    folder = data_folder(config)
    if kept.exists() and not _are_of_others(kept, folder):
        return
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
        if kept.exists():
            earlier = _earlier(run, vocabulary_fingerprint(kept, remedy(kept)))
            shutil.rmtree(earlier, ignore_errors=True)
            os.replace(kept, earlier)
        os.replace(unfinished, kept)
    except OSError as failure:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise RunFolderError(
            f"{kept}: cannot be written ({failure.strerror or failure}); make room there, or set "
            "run.dir to another folder"
        ) from None


def _are_of_others(kept: Path, folder: Path) -> bool:
    """Whether what a run kept is not what was learned for its data."""
    one, other = (read_manifest(path, remedy(kept)) for path in (kept, folder))
    # Ids that are rows have a manifest only.
    if one.learned == other.learned and one.fields == other.fields:
        return False
    return vocabulary_fingerprint(kept, remedy(kept)) != vocabulary_fingerprint(folder)


def kept_inputs(run: Path, sha256: str | None) -> Path | None:
    """What a run kept of its inputs; None where it kept nothing.

    Args:
        sha256: the vocabulary's that is asked for, where a run has had several.
    """
    if sha256 and _earlier(run, sha256).is_dir():
        return _earlier(run, sha256)
    return run / INPUTS if (run / INPUTS).is_dir() else None


def _earlier(run: Path, sha256: str) -> Path:
    """Where inputs are that were given up."""
    return run / f"{INPUTS}.{sha256[:12]}"


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def inputs_folder(config: Config, run: Path, sha256: str | None) -> Path | None:
    """The prepared folder, perhaps without rows, that says what a run's inputs are.

    Args:
        sha256: see `kept_inputs`.

    Returns:
        None for a run on synthetic clicks.

    Raises:
        RunFolderError: the run is older than this and its prepared data are gone.
    """
    if not isinstance(config.data, RawSection | PreparedSection):
        return None
    kept = kept_inputs(run, sha256)
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


def check_same_inputs(
    found: Manifest, trained: Mapping[str, int], numbers: int, where: Path, model: Path
) -> None:
    """Refuse data whose fields are not those that a model was trained on.

    Args:
        found: the data's.
        trained: rows of the model's tables, by field.
        numbers: of the model.
        where: the data, for the message.
        model: the checkpoint, for the message.

    Raises:
        DataError: names the first difference.
    """
    fields = {entry.name: entry.rows for entry in found.fields}
    for name, rows in trained.items():
        if name not in fields:
            has = ", ".join(fields)
            raise DataError(f"{where}: no id field {name!r}, which {model} needs; it has {has}")
        if fields[name] != rows:
            raise DataError(
                f"{where}: the table of {name!r} has {fields[name]:,} rows, but {rows:,} in "
                f"{model}: its vocabulary is another one. Score the raw files, or prepare them "
                "with `python -m stampede.data.apply`"
            )
    if list(fields) != list(trained):
        raise DataError(
            f"{where}: the id fields are {', '.join(fields)}, but in {model} they are "
            f"{', '.join(trained)}"
        )
    if len(found.numbers) != numbers:
        raise DataError(f"{where}: {len(found.numbers)} numbers, but {numbers} in {model}")


def check_same_vocabularies(found: Manifest, kept: Manifest, where: Path) -> None:
    """Refuse prepared data whose rows of tables mean other ids than those of a run.

    Raises:
        DataError: they do.
    """
    learned, theirs = (
        {Path(entry.name).name: entry.sha256 for entry in manifest.learned}
        for manifest in (kept, found)
    )
    differing = sorted(name for name in learned if theirs.get(name, learned[name]) != learned[name])
    if learned and theirs and differing:
        raise DataError(
            f"{where}: its {differing[0]} is not the one that the model was trained with, so its "
            "ids mean something else. Score the raw files, or prepare them with "
            "`python -m stampede.data.apply`"
        )


def read_learned(kept: Path) -> Learned | None:
    """What turns raw rows into inputs; None where nobody knows, as of imported arrays.

    Raises:
        DataError: it is damaged.
    """
    learned = kept / LEARNED_FOLDER
    return load(learned, remedy(kept)) if learned.is_dir() else None


def read_kept_saved(kept: Path) -> Saved | None:
    """What `read_learned` is made of.

    Raises:
        DataError: it is damaged.
    """
    learned = kept / LEARNED_FOLDER
    return read_saved(learned, remedy(kept)) if learned.is_dir() else None


def read_kept_manifest(kept: Path) -> Manifest:
    """The manifest of what `inputs_folder` found.

    Raises:
        DataError: it is damaged.
    """
    return read_manifest(kept, remedy(kept))


def remedy(kept: Path) -> str:
    """What to do where the folder that `inputs_folder` found is damaged."""
    if kept.name.partition(".")[0] != INPUTS:
        return f"delete {kept} and prepare the data again"
    return (
        f"delete {kept} to use the run's prepared data instead, if they are whole; or train again"
    )
