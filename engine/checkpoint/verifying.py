"""Whether the files of a checkpoint are as they were written."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stampede.data.prepared.checksum import sha256
from stampede.data.prepared.manifest import FileEntry
from stampede.engine.checkpoint.errors import DamagedCheckpointError
from stampede.engine.checkpoint.keeping import set_aside, tidy
from stampede.engine.checkpoint.manifest import read_manifest
from stampede.engine.checkpoint.names import newest_first
from stampede.engine.errors import RunFolderError
from stampede.engine.processes import Processes


def verify(path: Path) -> None:
    """Check lengths and checksums of all files of a checkpoint.

    Raises:
        DamagedCheckpointError: which one is not as it was written.
        RunFolderError: there is no checkpoint, or one of another format.
    """
    files = read_manifest(path).files
    # Lengths first: they cost nothing.
    wrong = [failure for entry in files if (failure := _wrong_length(path, entry))]
    if not wrong:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            wrong = [said for said in threads.map(lambda e: _wrong_content(path, e), files) if said]
    if wrong:
        raise DamagedCheckpointError(f"{path}: damaged checkpoint ({wrong[0]})")


def newest_whole(folder: Path, processes: Processes) -> Path | None:
    """The newest checkpoint that is as it was written; damaged ones are set aside, which is said.

    All ranks must call it, in a run that may write the folder; rank 0 looks at the files. What a
    run that was killed has left half-written is removed.

    Args:
        folder: a run's `checkpoints`; it need not exist.

    Returns:
        None if there are no checkpoints.

    Raises:
        RunFolderError: all are damaged, or one is of another format.
    """
    return processes.on_main(lambda: _newest_whole(folder))


def _newest_whole(folder: Path) -> Path | None:
    damaged = []
    try:
        tidy(folder)
        for path in newest_first(folder):
            try:
                verify(path)
            except DamagedCheckpointError as failure:
                damaged.append((path, failure))
                continue
            for other, failure in damaged:
                print(f"{failure}\n  set aside as {set_aside(other)}; {path} is used")
            return path
    except OSError as failure:
        raise RunFolderError(
            f"{folder}: cannot be read and written ({failure.strerror or failure}); see to its "
            "permissions and free space"
        ) from None
    if damaged:
        sentences = "\n".join(str(failure) for _, failure in damaged)
        raise RunFolderError(
            f"{sentences}\nno other checkpoint is left in {folder}; write run.overwrite=true to "
            "train anew, or choose another run.name"
        )
    return None


def _wrong_length(folder: Path, entry: FileEntry) -> str | None:
    try:
        found = (folder / entry.name).stat().st_size
    except OSError as failure:
        return f"{entry.name}: {failure.strerror or failure}"
    if found != entry.bytes:
        return f"{entry.name} has {found:,} bytes, {entry.bytes:,} were written"
    return None


def _wrong_content(folder: Path, entry: FileEntry) -> str | None:
    try:
        found = sha256(folder / entry.name)
    except OSError as failure:
        return f"{entry.name}: {failure.strerror or failure}"
    return (
        None if found == entry.sha256 else f"{entry.name} has not the checksum it was written with"
    )
