"""Names of checkpoints, and which of them is the newest."""

from __future__ import annotations

from pathlib import Path

from stampede.engine.checkpoint.manifest import MANIFEST, NAME, read_manifest
from stampede.engine.checkpoint.progress import Progress
from stampede.engine.errors import RunFolderError


def name_of(progress: Progress) -> str:
    """Name of the checkpoint at a point of a run: of an epoch's end, or of a step."""
    if progress.is_epoch_end:
        return _of_epoch(progress.epoch)
    return f"step_{progress.step:08d}"


def checkpoint_of(folder: Path, epoch: int) -> Path | None:
    """The whole checkpoint of an epoch's end in a run's `checkpoints` folder, if it is there."""
    path = folder / _of_epoch(epoch)
    return path if (path / MANIFEST).is_file() else None


def newest(folder: Path) -> Path | None:
    """The checkpoint with most steps in a run's `checkpoints` folder.

    Only manifests are looked at. One that cannot be read may be the newest, and counts as such.
    """
    return next(iter(newest_first(folder)), None)


def newest_first(folder: Path) -> list[Path]:
    """All checkpoints that have their name, those whose manifest cannot be read before all."""
    return [path for _, path in sorted(map(_with_age, _named(folder)), reverse=True)]


def readable(folder: Path) -> list[tuple[Path, Progress]]:
    """All checkpoints whose manifest can be read, the newest first."""
    found = []
    for path in _named(folder):
        try:
            found.append((path, read_manifest(path).progress))
        except RunFolderError:
            continue
    return sorted(found, key=lambda one: _age(one[1]), reverse=True)


def _named(folder: Path) -> list[Path]:
    # A copy by another name, such as `epoch_0001_kept`, is its owner's.
    return [path for path in folder.glob("*_*") if NAME.fullmatch(path.name) and path.is_dir()]


def _with_age(path: Path) -> tuple[tuple[int, bool], Path]:
    try:
        return _age(read_manifest(path).progress), path
    except RunFolderError:
        return (1 << 63, True), path


def _age(progress: Progress) -> tuple[int, bool]:
    # At one step that of an epoch's end is made later, after its evaluation.
    return progress.step, progress.is_epoch_end


def _of_epoch(epoch: int) -> str:
    return f"epoch_{epoch:04d}"
