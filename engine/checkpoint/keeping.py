"""Which checkpoints a run keeps; damaged ones are set aside."""

from __future__ import annotations

import os
from itertools import chain, count
from pathlib import Path

from stampede.engine.checkpoint.names import readable
from stampede.engine.config import CheckpointSection
from stampede.files import delete_folder, hidden


def prune(folder: Path, settings: CheckpointSection, best_epoch: int) -> None:
    """Delete what is neither new, nor the best epoch's, nor every K-th epoch's."""
    found = readable(folder)
    every = settings.keep_every
    for path, progress in found[settings.keep :]:
        epoch = progress.epoch if progress.is_epoch_end else 0
        kept = epoch and (epoch == best_epoch or (every and epoch % every == 0))
        if not kept:
            delete_folder(path)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it counts no more; the new path, which was free."""
    names = chain(["damaged"], (f"damaged_{number}" for number in count(2)))
    aside = next(free for name in names if not os.path.lexists(free := hidden(path, name)))
    os.replace(path, aside)
    return aside
