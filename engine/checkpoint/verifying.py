"""Whether the files of a checkpoint are as they were written."""

from __future__ import annotations

from pathlib import Path

from stampede.engine.checkpoint.errors import REMEDY, DamagedCheckpointError
from stampede.engine.checkpoint.keeping import set_aside
from stampede.engine.checkpoint.manifest import read_manifest
from stampede.engine.checkpoint.names import newest_first
from stampede.engine.errors import RunFolderError
from stampede.engine.processes import PATIENCE, Processes
from stampede.files import check_files, recover_folders


def verify(path: Path, remedy: str = REMEDY) -> None:
    """Check lengths and checksums of all files of a checkpoint.

    Args:
        remedy: what to do where one is not as it was written.

    Raises:
        DamagedCheckpointError: which one is not as it was written.
        RunFolderError: there is no checkpoint, or one of another format.
    """
    files = read_manifest(path, remedy).files
    try:
        check_files(path, files)
    except ValueError as failure:
        raise DamagedCheckpointError(f"{path}: damaged checkpoint ({failure}); {remedy}") from None


def _unusable(folder: Path, failure: OSError) -> RunFolderError:
    return RunFolderError(
        f"{folder}: cannot be read and written ({failure.strerror or failure}); see to its "
        "permissions and free space"
    )


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
    return processes.on_main(lambda: _newest_whole(folder), patience=PATIENCE)


def _newest_whole(folder: Path) -> Path | None:
    damaged = []
    try:
        recover_folders(folder)
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
        raise _unusable(folder, failure) from None
    if damaged:
        sentences = "\n".join(str(failure) for _, failure in damaged)
        raise RunFolderError(
            f"{sentences}\nno other checkpoint is left in {folder}; write run.overwrite=true to "
            "train anew, or choose another run.name"
        )
    return None
