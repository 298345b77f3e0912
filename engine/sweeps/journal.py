"""Optuna's journal of a study, `study.log`, also after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from stampede.engine.sweeps.files import reading, writing

if TYPE_CHECKING:
    from optuna.storages import JournalStorage

NAME = "study.log"


def open_journal(folder: Path) -> JournalStorage:
    """Open the journal, without what a kill left unfinished.

    Args:
        folder: of the sweep, which no other process writes.

    Raises:
        RunFolderError: it is damaged, or cannot be written.
    """
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    # Absolute: Optuna's lock is a link to it, which from elsewhere would lead nowhere.
    path = folder.resolve() / NAME
    with writing(path):
        # A lock that is there is that of a process that was killed.
        for lock in path.parent.glob(f"{NAME}.lock*"):
            lock.unlink()
    with reading(path, "repair the line, or write another --out"):
        _cut_half_a_line(path)
        return JournalStorage(JournalFileBackend(str(path)))


def _cut_half_a_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        file.truncate(len(whole))
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            json.loads(line)
        except ValueError as failure:
            raise ValueError(f"line {number}: {failure}") from None
