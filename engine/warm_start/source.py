"""Where weights come from: a checkpoint, and what the ids of its run were."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from stampede.data.learning.row_meanings import RowMeanings, row_meanings
from stampede.data.prepared.manifest import LEARNED_FOLDER, MANIFEST
from stampede.engine.checkpoint import Manifest, read_manifest, verify
from stampede.engine.errors import RunFolderError
from stampede.engine.inference.inputs import kept_inputs
from stampede.engine.inference.same_inputs import check_trained_with
from stampede.engine.inference.trained import choose_checkpoint
from stampede.files import file_size
from stampede.settings import cut

_REMEDY = "copy it again from where the run was made, or begin without its weights"

# Of clicks whose ids are rows of their tables.
_SYNTHETIC = "synthetic"


@dataclass(frozen=True)
class Source:
    """A checkpoint, whole and with the vocabularies that it was trained with.

    Attributes:
        checkpoint: its folder.
        inputs: a prepared folder without rows that says what its ids are; None for synthetic
            clicks, whose ids are rows of their tables.
    """

    checkpoint: Path
    inputs: Path | None

    def meanings(self) -> dict[str, RowMeanings] | None:
        """What the rows of its tables stand for, by field; None for synthetic clicks.

        Raises:
            DataError: a vocabulary is damaged.
        """
        return None if self.inputs is None else row_meanings(self.inputs, _REMEDY)


def open_source(init_from: str, run: Path) -> Source:
    """What `checkpoint.init_from` names, all checksums compared. Nothing of it is executed.

    Args:
        init_from: a checkpoint, or a run folder: then that of its best epoch, before the first
            evaluation the newest.
        run: folder of the run that is to begin.

    Raises:
        RunFolderError, DataError: there is none, it is damaged, or its vocabularies are not there.
    """
    path = Path(init_from).absolute()
    if not os.path.isdir(path):
        raise RunFolderError(
            f"checkpoint.init_from: {init_from}: there is no such run folder or checkpoint"
        )
    if run.absolute().resolve() in (path.resolve(), *path.resolve().parents):
        raise RunFolderError(
            f"checkpoint.init_from: {init_from} is in {run}, where this run begins anew; write "
            "another run.name, or checkpoint.resume=auto to continue it"
        )
    checkpoint = choose_checkpoint(path, remedy=_REMEDY)
    verify(checkpoint, _REMEDY)
    return source_of(checkpoint)


def source_of(checkpoint: Path) -> Source:
    """A checkpoint that is known to be whole, in its run folder.

    Raises:
        RunFolderError, DataError: the vocabularies that it was trained with are not there.
    """
    manifest = read_manifest(checkpoint)
    if _kind(manifest) == _SYNTHETIC:
        return Source(checkpoint, None)
    run = checkpoint.parent.parent
    kept = kept_inputs(run)
    if kept is None:
        raise RunFolderError(
            f"{checkpoint}: what its ids are is not known: {run / 'inputs'} is absent, where a run "
            f"keeps its vocabularies; {_REMEDY}"
        )
    _check_own_files(kept)
    check_trained_with(kept, manifest.data, checkpoint, _REMEDY)
    return Source(checkpoint, kept)


def _check_own_files(kept: Path) -> None:
    """Refuse links, which lead anywhere, and pipes, which never end."""
    learned = kept / LEARNED_FOLDER
    folders = [path for path in (kept, learned) if os.path.lexists(path)]
    try:
        for path in folders:
            if not stat.S_ISDIR(path.lstat().st_mode):
                raise ValueError(f"{path.name} is not a folder of its own")
        for file in (kept / MANIFEST, *(learned.iterdir() if learned in folders else ())):
            file_size(file)
    except (OSError, ValueError) as failure:
        raise RunFolderError(f"{kept}: damaged ({cut(str(failure))}); {_REMEDY}") from None


def _kind(manifest: Manifest) -> object:
    data = manifest.config.get("data")
    return data.get("kind") if isinstance(data, dict) else None
