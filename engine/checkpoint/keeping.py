"""Which checkpoints a run keeps, and how others go: never half, whenever the process is killed."""

from __future__ import annotations

import os
import shutil
from itertools import chain, count
from pathlib import Path

from stampede.data.prepared.whole_folder import sync_folder
from stampede.engine.checkpoint.names import readable
from stampede.engine.config import CheckpointSection

_UNFINISHED, _DELETED, _REPLACED = "tmp", "deleted", "replaced"


def unfinished(path: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return _hidden(path, _UNFINISHED)


def publish(path: Path) -> None:
    """Give a written checkpoint its name; an older one of that name goes."""
    replaced = _hidden(path, _REPLACED)
    # A failure of power must not leave a checkpoint's name without its files.
    sync_folder(unfinished(path))
    if path.exists():
        # Where an earlier one could not be deleted.
        if replaced.exists():
            shutil.rmtree(replaced)
        os.replace(path, replaced)
    os.replace(unfinished(path), path)
    sync_folder(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def prune(folder: Path, settings: CheckpointSection, best_epoch: int) -> None:
    """Delete what is neither new, nor the best epoch's, nor every K-th epoch's."""
    found = readable(folder)
    every = settings.keep_every
    for path, progress in found[settings.keep :]:
        epoch = progress.epoch if progress.is_epoch_end else 0
        kept = epoch and (epoch == best_epoch or (every and epoch % every == 0))
        if not kept:
            delete(path)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it counts no more; the new path, which was free."""
    names = chain(["damaged"], (f"damaged_{number}" for number in count(2)))
    aside = next(free for name in names if not os.path.lexists(free := _hidden(path, name)))
    os.replace(path, aside)
    return aside


def tidy(folder: Path) -> None:
    """Remove what a run that was killed while it wrote or deleted has left."""
    for replaced in folder.glob(f".*.{_REPLACED}"):
        path = folder / replaced.name[1 : -len(_REPLACED) - 1]
        if not path.exists():
            os.replace(replaced, path)
    for kind in (_UNFINISHED, _DELETED, _REPLACED):
        for path in folder.glob(f".*.{kind}"):
            shutil.rmtree(path, ignore_errors=True)


def delete(path: Path) -> None:
    """Delete a checkpoint, which loses its name first."""
    deleted = _hidden(path, _DELETED)
    shutil.rmtree(deleted, ignore_errors=True)
    os.replace(path, deleted)
    shutil.rmtree(deleted, ignore_errors=True)


def _hidden(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}")
