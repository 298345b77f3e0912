"""Trials that failed, in `failures.json`, and why."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from stampede.engine.config import Config
from stampede.engine.sweeps.files import reading, writing
from stampede.engine.sweeps.measured import compared
from stampede.files import to_json, write_file

# torchrun's own lines, such as `error_file: <N/A>`, do not begin so.
_ERROR = re.compile(r"error( on rank \d+)?: ")


class Failures:
    """The trials of a sweep that failed, each with its configuration then.

    Args:
        path: the file, read and written.

    Raises:
        RunFolderError: it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, tuple[str, str]] = {}
        if path.exists():
            with reading(path, "delete it to run the trials that failed again"):
                found = json.loads(path.read_text(encoding="utf-8"))
                self._found = {name: (one["message"], one["config"]) for name, one in found.items()}

    def names(self) -> set[str]:
        """All trials that failed."""
        return set(self._found)

    def message(self, name: str, config: Config) -> str:
        """Why a trial of that configuration failed; empty where it did not."""
        message, digest = self._found.get(name, ("", ""))
        return message if digest == _digest(config) else ""

    def add(self, name: str, config: Config, message: str) -> None:
        """Remember a failure.

        Raises:
            RunFolderError: it cannot be written.
        """
        self._found[name] = (message, _digest(config))
        self._write()

    def drop(self, name: str) -> None:
        """Forget a failure, if there is one.

        Raises:
            RunFolderError: it cannot be written.
        """
        if self._found.pop(name, None) is not None:
            self._write()

    def _write(self) -> None:
        content = {name: {"message": m, "config": c} for name, (m, c) in self._found.items()}
        with writing(self._path):
            write_file(self._path, to_json(content, indent=1) + "\n")


def _digest(config: Config) -> str:
    text = json.dumps(compared(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def why(said: bytes, status: int) -> str:
    """The sentence of a failed run, or its last words.

    Args:
        said: its output, on any number of processes.
        status: its exit status.
    """
    lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
    for number, line in enumerate(lines):
        begins = _ERROR.match(line)
        if begins:
            # The first: what other processes say follows from it. Its list is indented.
            more = []
            for following in lines[number + 1 :]:
                if not following.startswith(" "):
                    break
                more.append(following.strip())
            return " ".join([line[begins.end() :].strip(), *more])
    killed = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    return f"{killed}: {lines[-1].strip()}" if lines else killed
