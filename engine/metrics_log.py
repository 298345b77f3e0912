"""`metrics.jsonl`: a line of JSON for all that is measured in a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stampede.files import append, sync, to_json, write_file

# Damaged lines that a sentence names.
_NAMED = 8


class MetricsLog:
    """The lines of a run; whoever writes them does so alone.

    Attributes:
        path: the file; it need not exist.
        count: lines that this process has kept or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0

    def append(self, line: dict[str, Any]) -> None:
        """Append a line.

        Raises:
            OSError: it cannot be written, and the file is as before.
        """
        append(self.path, f"{to_json(line)}\n".encode())
        self.count += 1

    def read(self) -> list[dict[str, Any]]:
        """All whole lines.

        Raises:
            OSError, ValueError: the file cannot be read, or a line of it is damaged.
        """
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        return [json.loads(line) for line in _whole_lines(text)]

    def stored(self) -> int:
        """Whole lines in the file."""
        return len(self._stored())

    def keep(self, count: int) -> list[str]:
        """Drop all but the first lines: those of steps that a resumed run will do again.

        Args:
            count: lines that had been written.

        Returns:
            What of them is lost, for people.

        Raises:
            OSError: the file cannot be read or written.
        """
        lines = self._stored()[:count]
        damaged = [number for number, line in enumerate(lines, 1) if not _is_line(line)]
        kept = [line for line in lines if _is_line(line)] if damaged else lines
        write_file(self.path, "".join(kept))
        self.count = len(kept)
        lost = []
        if damaged:
            which = ", ".join(map(str, damaged[:_NAMED])) + (", .." if damaged[_NAMED:] else "")
            lost.append(f"{self.path}: damaged lines are left out: {which}")
        if len(lines) < count:
            lost.append(
                f"{self.path}: {count:,} lines had been written by the step that the run goes on "
                f"from, and {count - len(lines):,} of them are missing"
            )
        return lost

    def sync(self) -> None:
        """Have the lines on the disk, also after a power loss.

        Raises:
            OSError: they cannot be written.
        """
        if self.count:
            sync(self.path)
            # The file may have come in the place of an older one.
            sync(self.path.parent)

    def _stored(self) -> list[str]:
        # There may be anything after a power loss.
        text = self.path.read_bytes().decode(errors="replace") if self.path.exists() else ""
        return _whole_lines(text)


def _whole_lines(text: str) -> list[str]:
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _is_line(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
