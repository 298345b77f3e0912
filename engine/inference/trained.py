"""A trained model: a checkpoint, the configuration of its run, what its inputs are."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stampede.engine.checkpoint import checkpoint_of, newest, read_manifest, verify
from stampede.engine.checkpoint.errors import REMEDY
from stampede.engine.config import Config
from stampede.engine.config.load import load_config_of_run
from stampede.engine.errors import RunFolderError
from stampede.engine.network_copy import check_unexecuted
from stampede.engine.run_folder import RunFolder
from stampede.settings import read_yaml, shown

BEST, NEWEST = "best", "newest"


@dataclass(frozen=True)
class Trained:
    """A checkpoint and its run.

    Attributes:
        run: the run folder.
        checkpoint: folder of the checkpoint.
        epoch: epochs trained.
        config: of the run.
        vocabulary_sizes: rows of each field's table, by field name.
        numbers: number of numeric inputs.
        vocabulary_sha256: of what its ids mean; None where the checkpoint does not say.
    """

    run: Path
    checkpoint: Path
    epoch: int
    config: Config
    vocabulary_sizes: Mapping[str, int]
    numbers: int
    vocabulary_sha256: str | None


def open_trained(path: Path, epoch: str | None = None, *, allow_import: bool = False) -> Trained:
    """A checkpoint of a run.

    Args:
        path: a run folder, or a checkpoint in it.
        epoch: which checkpoint of a run folder: `best`, which is the default, `newest`, or the
            number of an epoch.
        allow_import: execute the Python file with the network, where the run has one of its own;
            the log says so.

    Raises:
        RunFolderError: there is no such run or checkpoint, it is damaged, or the file of its
            network may not be executed or is not as it was.
        SettingsError: the configuration of the run cannot be used.
    """
    if not os.path.exists(path):
        raise RunFolderError(f"{path}: there is no such run folder or checkpoint")
    checkpoint = choose_checkpoint(path.absolute(), epoch)
    run = RunFolder(checkpoint.parent.parent)
    if not run.config_file.is_file():
        raise RunFolderError(
            f"{checkpoint}: is not in a run folder ({run.config_file} is absent); a checkpoint "
            "stays where the run wrote it"
        )
    verify(checkpoint)
    manifest = read_manifest(checkpoint)
    imported = _imported(run.config_file)
    if imported and not allow_import:
        raise RunFolderError(
            f"{run.config_file}: its network is Python code, {shown(imported)}, which would be "
            "executed; write --allow-import if you trust it and this run folder"
        )
    check_unexecuted(run.path, run.config_file)
    config = load_config_of_run(run.config_file)
    if imported:
        print(f"model.import: {config.model.import_file} was executed", file=sys.stderr)
    return Trained(
        run=run.path,
        checkpoint=checkpoint,
        epoch=manifest.progress.epoch,
        config=config,
        vocabulary_sizes=manifest.data.vocabulary_sizes,
        numbers=manifest.data.numbers,
        vocabulary_sha256=manifest.data.vocabulary_sha256,
    )


def _imported(config_file: Path) -> Any:
    """What the configuration says under `model.import`; nothing of it is executed."""
    model = read_yaml(config_file, "").get("model")
    return model.get("import") if isinstance(model, dict) else None


def choose_checkpoint(path: Path, epoch: str | None = None, remedy: str = REMEDY) -> Path:
    """The folder of a checkpoint; see `open_trained`. Its files are not looked at.

    Args:
        path: absolute; also the `checkpoints` of a run, or a link that leads to one of these.
        remedy: what to do where the newest one's manifest is damaged.

    Raises:
        RunFolderError: there is none.
    """
    path = _in_its_run(path)
    above = path.parent.parent
    if _is_among_checkpoints(path):
        if epoch is not None:
            raise RunFolderError(
                f"{path} is the checkpoint of one epoch; leave --epoch out, or write the run "
                f"folder {above}"
            )
        return path
    folder = RunFolder(path).checkpoints
    last = newest(folder)
    if last is None:
        raise RunFolderError(
            f"{path}: no checkpoint in it ({folder} holds none); write a run folder such as "
            "runs/quickstart, trained for an epoch or more"
        )
    if epoch == NEWEST:
        return last
    if epoch in (None, BEST):
        best = read_manifest(last, remedy).progress.best_epoch
        # Before the first evaluation no epoch is the best.
        return _existing(folder, best) if best else last
    if not epoch.isdecimal():
        raise RunFolderError(f"--epoch: found {epoch!r}; write best, newest, or a number")
    return _existing(folder, int(epoch))


def _in_its_run(path: Path) -> Path:
    """A run folder, or a checkpoint in one, at the place where the run has it."""
    for found in (path, path.resolve()):
        if RunFolder(found).checkpoints.is_dir() or _is_among_checkpoints(found):
            return found
        if found == RunFolder(found.parent).checkpoints:
            return found.parent
    return path


def _is_among_checkpoints(path: Path) -> bool:
    return path.parent == RunFolder(path.parent.parent).checkpoints


def _existing(folder: Path, epoch: int) -> Path:
    found = checkpoint_of(folder, epoch)
    if found is None:
        there = ", ".join(sorted(path.name for path in folder.glob("epoch_*"))) or "none"
        raise RunFolderError(
            f"{folder}: no whole checkpoint of epoch {epoch}; there are: {there} "
            "(checkpoint.keep says how many a run keeps)"
        )
    return found
