"""The file of a user's own network, kept in the run folder as it was trained."""

from __future__ import annotations

from pathlib import Path

from stampede.engine.config import Config
from stampede.engine.config.model import executed_source
from stampede.engine.errors import RunFolderError, TrainingStoppedError
from stampede.files import write_file
from stampede.settings import read_yaml

# In the run folder.
COPY = "network.py"


def keep_network(config: Config, run: Path, *, replace: bool) -> None:
    """Keep what was executed of `model.import` in a run's folder.

    Only this file, not what it imports: the copy is there to compare and to restore, and is not
    executed.

    Args:
        replace: whether the run trains anew; else a copy that is there stays.

    Raises:
        TrainingStoppedError: it cannot be written.
    """
    copy, file = run / COPY, config.model.import_file
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
        _check(config.model.import_file, executed_source(config.model.import_file), run / COPY)


def check_unexecuted(run: Path, config_file: Path) -> None:
    """Refuse to execute another file than a run was trained with, before it is done.

    Where the file is gone the copy is not taken for it: it may import what lay beside it. Runs
    that kept no copy are not checked.

    Args:
        config_file: the run's.

    Raises:
        RunFolderError: the file is not what the run kept, or gone.
        SettingsError: the configuration cannot be read.
    """
    model = read_yaml(config_file, "a run keeps it in its folder").get("model")
    file = model.get("import") if isinstance(model, dict) else None
    copy = run / COPY
    # What is no text is refused where all keys are checked.
    if not file or not isinstance(file, str) or not copy.is_file():
        return
    try:
        found = Path(file).read_bytes()
    except FileNotFoundError:
        raise RunFolderError(
            f"model.import: {file}, which the network of {run} was made from, is gone; the run has "
            f"a copy, {copy}: copy it there, and what it imports beside it"
        ) from None
    except OSError as failure:
        raise RunFolderError(f"{file}: cannot be read ({failure.strerror or failure})") from None
    _check(file, found, copy)


def _check(file: str, found: bytes, copy: Path) -> None:
    try:
        same = not copy.is_file() or copy.read_bytes() == found
    except OSError as failure:
        raise RunFolderError(f"{copy}: cannot be read ({failure.strerror or failure})") from None
    if not same:
        raise RunFolderError(
            f"model.import: {file} is not as it was when {copy.parent} was trained, so its network "
            f"may be another one; what it was is in {copy}: copy that there, or train anew "
            "into another folder"
        )
