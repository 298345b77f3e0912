"""What a rank tells the others about itself."""

from __future__ import annotations

import json
import linecache
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

_PROJECT = Path(__file__).parents[2]
_LIBRARIES = tuple(f"{os.sep}{name}{os.sep}distributed{os.sep}" for name in ("torch", "torchrec"))


@dataclass(frozen=True)
class Standing:
    """Where a rank is.

    Attributes:
        published: number of this standing, which grows as long as the rank's watchdog runs.
        beats, step, stage: see `stampede.engine.pulse.Pulse`.
        still_seconds: time in which the rank ran and its pulse did not beat.
        hangs: whether that is too long.
        place: where its main thread is, as `file:line in function`.
        waits: whether it is seen to wait for other ranks there.
        ended: whether its training loop has ended, well or not.
    """

    published: int
    beats: int
    step: int
    stage: str
    still_seconds: float = 0.0
    hangs: bool = False
    place: str = ""
    waits: bool = False
    ended: bool = False

    def to_bytes(self) -> str:
        """As it lies in the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_bytes(cls, text: bytes) -> Standing:
        """From what `to_bytes` gave."""
        return cls(**json.loads(text))


def place_of(thread: int) -> tuple[str, bool]:
    """Where a thread of this process is: `file:line in function`, and if it waits for other ranks.

    The place is the innermost one in the project's own files, if there is one.

    Args:
        thread: its `ident`.
    """
    innermost = frame = sys._current_frames().get(thread)
    if innermost is None:
        return "", False
    while frame is not None and not _own(frame):
        frame = frame.f_back
    shown = frame or innermost
    code = shown.f_code
    path = Path(code.co_filename)
    name = path.relative_to(_PROJECT) if _own(shown) else path.name
    return f"{name}:{shown.f_lineno} in {code.co_name}", _waits(innermost)


def _own(frame: FrameType) -> bool:
    path = Path(frame.f_code.co_filename)
    return path.is_relative_to(_PROJECT) and "site-packages" not in path.relative_to(_PROJECT).parts


def _waits(frame: FrameType) -> bool:
    # A collective that was started earlier is waited for in C++, called from whatever file.
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return ".wait(" in line or any(part in frame.f_code.co_filename for part in _LIBRARIES)
