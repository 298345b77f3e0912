"""The checkpoints of a run: their names, which to use, which to keep, which are intact."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from stampede.engine.checkpoint.manifest import (
    MANIFEST,
    NAME,
    REMEDY,
    DamagedCheckpointError,
    read_manifest,
)
from stampede.engine.config import CheckpointSection
from stampede.engine.errors import RunFolderError
from stampede.engine.results.run_folder import RunFolder
from stampede.engine.training.progress import Progress
from stampede.files import check_files, delete_folder, hidden, recover_folders, remove


def name_of(progress: Progress) -> str:
    """Name of the checkpoint of an epoch's end, or of a step."""
    if progress.is_epoch_end:
        return f"epoch_{progress.epoch:04d}"
    return f"step_{progress.step:08d}"


def checkpoint_of(folder: Path, epoch: int) -> Path | None:
    """The checkpoint of an epoch's end in a run's `checkpoints` folder, or None."""
    path = folder / f"epoch_{epoch:04d}"
    return path if (path / MANIFEST).is_file() else None


def newest(folder: Path) -> Path | None:
    """The checkpoint with the most steps in a run's `checkpoints` folder, by manifests only.

    An unreadable one counts as the newest, because it could be.
    """
    return next((path for path, _ in _newest_first(folder)), None)


def choose_checkpoint(path: Path, epoch: str | None = None, remedy: str | None = None) -> Path:
    """Choose a checkpoint by reading manifests only.

    Args:
        path: absolute: a run folder, its `checkpoints` folder, a checkpoint, or a link to one.
        epoch: which one of a run folder: `best` (default), `newest`, or an epoch's number.
        remedy: advice for the error if the newest manifest is damaged; None: use the newest
            readable one and say so.

    Raises:
        RunFolderError: there is none.
    """
    for found in (path, path.resolve()):
        if found == RunFolder(found.parent).checkpoints:
            path = found.parent
            break
        if found.parent == RunFolder(found.parent.parent).checkpoints:
            if epoch is not None:
                raise RunFolderError(
                    f"{found} is a checkpoint of one epoch; leave --epoch out, or write the run "
                    f"folder {found.parent.parent}"
                )
            return found
        if RunFolder(found).checkpoints.is_dir():
            path = found
            break
    folder = RunFolder(path).checkpoints
    last = newest(folder)
    if last is None:
        raise RunFolderError(f"{path}: {_why_none(path)}")
    if epoch == "newest":
        return last
    if epoch in (None, "best"):
        try:
            best = read_manifest(last, remedy or REMEDY).progress.best_epoch
        except DamagedCheckpointError as failure:
            others = readable(folder)
            if remedy or not others:
                raise
            last, progress = others[0]
            best = progress.best_epoch
            print(f"{failure}; {last} is the newest that can be read", file=sys.stderr)
        # There is no best epoch before the first evaluation.
        if not best:
            return last
        epoch = str(best)
    if not epoch.isdecimal():
        raise RunFolderError(f"--epoch: found {epoch!r}; write best, newest, or a number")
    found = checkpoint_of(folder, int(epoch))
    if found is None:
        there = ", ".join(sorted(path.name for path in folder.glob("epoch_*"))) or "none"
        raise RunFolderError(
            f"{folder}: no complete checkpoint of epoch {epoch}; there are: {there} "
            "(checkpoint.keep says how many a run keeps)"
        )
    return found


def _why_none(run: Path) -> str:
    """Why a run folder has no checkpoint, and what to write instead."""
    if periods := sorted(run.glob("period_*")):
        return (
            "each period of stampede incremental has its own run folder; write "
            f"{periods[-1]}, the newest"
        )
    siblings = sorted(run.parent.glob("period_*"))
    others = [one.name for one in siblings if newest(RunFolder(one).checkpoints)]
    if run.name.startswith("period_") and others and run.name < others[-1]:
        return (
            "its checkpoint was deleted, as only the newest periods keep theirs "
            f"(checkpoint.keep); there are: {', '.join(others)}"
        )
    return (
        f"has no checkpoint ({RunFolder(run).checkpoints} holds none); write a run folder such as "
        "runs/quickstart, trained for at least one epoch"
    )


def prune(folder: Path, settings: CheckpointSection, best_epoch: int) -> None:
    """Delete checkpoints other than the newest, the best epoch's and every K-th epoch's."""
    if sum(NAME.fullmatch(path.name) is not None for path in folder.glob("*_*")) <= settings.keep:
        # Their manifests need not be read.
        return
    every = settings.keep_every
    for path, progress in readable(folder)[settings.keep :]:
        epoch = progress.epoch if progress.is_epoch_end else 0
        if not (epoch and (epoch == best_epoch or (every and epoch % every == 0))):
            _delete_unless_read(path)


def delete_all(folder: Path) -> bool:
    """Delete all checkpoints that nobody is reading; returns whether the folder is gone."""
    for path, _ in readable(folder):
        _delete_unless_read(path)
    if _newest_first(folder):
        return False
    if folder.exists():
        delete_folder(folder)
    return True


def _delete_unless_read(path: Path) -> None:
    """Delete a checkpoint; one that is being read is deleted after a later save."""
    with (path / MANIFEST).open("rb") as handle:
        if _lock(handle, fcntl.LOCK_EX):
            delete_folder(path)


def being_read(choose: Callable[[], Path]) -> tuple[Path, BinaryIO | None]:
    """Keep a checkpoint from being deleted by its run until the returned file is closed.

    `choose` picks it, again if that one has just been deleted. The file is None if it cannot be
    opened.
    """
    before = None
    while True:
        path = choose()
        try:
            handle = (path / MANIFEST).open("rb")
        except OSError:
            if path == before:
                return path, None
            before = path
            continue
        if _lock(handle, fcntl.LOCK_SH) and path.exists():
            return path, handle
        handle.close()


def _lock(handle: BinaryIO, how: int) -> bool:
    """Take a lock without waiting; returns whether it was free."""
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A file system without locks.
        pass
    return True


def verify(path: Path, remedy: str = REMEDY) -> None:
    """Check lengths and checksums of all files of a checkpoint.

    Raises:
        DamagedCheckpointError: names the first damaged file.
        RunFolderError: there is no checkpoint, or its format is unknown.
    """
    try:
        check_files(path, read_manifest(path, remedy).files)
    except ValueError as failure:
        raise DamagedCheckpointError(f"{path}: damaged checkpoint ({failure}); {remedy}") from None


def newest_whole(folder: Path) -> Path | None:
    """The newest whole checkpoint, or None; damaged ones are renamed, with a message.

    The run must own the folder; unfinished checkpoints of a killed run are removed.

    Raises:
        RunFolderError: all are damaged, or one is of another format.
    """
    damaged = []
    try:
        recover_folders(folder, NAME)
        for path, _ in _newest_first(folder):
            try:
                verify(path)
            except DamagedCheckpointError as failure:
                damaged.append((path, failure))
                continue
            for other, failure in damaged:
                aside = hidden(other, "damaged")
                remove(aside)
                os.replace(other, aside)
                print(f"{failure}\n  set aside as {aside}; {path} is used")
            return path
    except OSError as failure:
        raise RunFolderError(
            f"{folder}: cannot be read and written ({failure.strerror or failure}); check its "
            "permissions and the free space"
        ) from None
    if damaged:
        sentences = "\n".join(str(failure) for _, failure in damaged)
        raise RunFolderError(
            f"{sentences}\nno other checkpoint is left in {folder}; write run.overwrite=true to "
            "train from scratch, or choose another run.name"
        )
    return None


def _newest_first(folder: Path) -> list[tuple[Path, Progress | None]]:
    """All checkpoints, newest first, after those whose manifest is unreadable (None)."""
    found = []
    for path in folder.glob("*_*"):
        # A copy under another name, such as `epoch_0001_kept`, belongs to the user.
        if NAME.fullmatch(path.name):
            try:
                progress = read_manifest(path).progress
            except RunFolderError:
                progress = None
            # Its run may have deleted it in the meantime.
            if path.is_dir():
                found.append((path, progress))

    def age(checkpoint: tuple[Path, Progress | None]) -> tuple[Any, ...]:
        path, progress = checkpoint
        if progress is None:
            return True, path
        # At the same step, the one of an epoch's end is newer: it follows the evaluation.
        return False, progress.step, progress.is_epoch_end, path

    return sorted(found, key=age, reverse=True)


def readable(folder: Path) -> list[tuple[Path, Progress]]:
    """All checkpoints with a readable manifest, newest first."""
    return [(path, progress) for path, progress in _newest_first(folder) if progress is not None]
