"""Where a process is in its run, told to whoever kills it; also after it is dead."""

import mmap
import os
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from stampede.engine.heartbeat import Heartbeat

_RECORD = struct.Struct("<qqq40s")

# Stages of a step that is not taken yet.
_TAKING = (
    "looking up",
    "computing",
    "adding up the loss",
    "updating tables",
    "updating dense layers",
)
_EVALUATING = ("evaluating", "computing metrics", "going on after computing metrics")


@dataclass(frozen=True)
class Place:
    """What `stampede.engine.heartbeat.Heartbeat` said last.

    Attributes:
        pid: of the process.
        first_step: of this start of the run; 0 before it.
        step: that is being taken or was taken last; 0 before the first one of this start.
        stage: of it.
    """

    pid: int
    first_step: int
    step: int
    stage: str

    @property
    def done(self):
        """Steps of the run that were taken; None before the first one of this start."""
        if not self.step:
            return None
        return self.step - 1 if self.stage in _TAKING else self.step


@contextmanager
def telling(path):
    """Within it every beat of the heartbeat is written to a file, by way of memory."""
    unfinished = path.with_suffix(".new")
    unfinished.write_bytes(bytes(_RECORD.size))
    with unfinished.open("r+b") as file, mmap.mmap(file.fileno(), 0) as record:

        def write(first_step, step, stage):
            record[:] = _RECORD.pack(os.getpid(), first_step, step, stage.encode())

        beat = Heartbeat.beat

        def beat_and_tell(self, stage, step=None):
            beat(self, stage, step)
            write(self.first_step, self.step, self.stage)

        write(0, 0, "starting")
        # A new file: that of a process that was killed may be open still.
        os.replace(unfinished, path)
        with mock.patch.object(Heartbeat, "beat", beat_and_tell):
            yield


def place_in(path):
    """What was told last; None if nothing was."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    pid, first_step, step, stage = _RECORD.unpack(content)
    return Place(pid, first_step, step, stage.rstrip(b"\0").decode()) if pid else None


def stage_of(place):
    """`start`, `evaluation`, `saving` (of the main thread) or `training`."""
    if place is None or place.stage == "starting":
        return "start"
    if place.stage in _EVALUATING:
        return "evaluation"
    return "saving" if place.stage == "saving" else "training"


def is_writing(place, run):
    """Whether a checkpoint is being written, or was when the process died.

    A run that starts has not yet removed what was left of one.
    """
    return stage_of(place) != "start" and any((run / "checkpoints").glob(".*.tmp"))
