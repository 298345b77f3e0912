"""The launcher in processes that tell where they are and may be killed; here also a program."""

import mmap
import multiprocessing
import os
import runpy
import signal
import struct
import sys
import time
import traceback
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from stampede.engine.heartbeat import Heartbeat
from support.forked import START_METHOD
from support.paths import ROOT

_RECORD = struct.Struct("<qqq40s")

# Stages of a step that is not taken yet.
_TAKING = (
    "looking up",
    "computing",
    "adding up the loss",
    "updating tables",
    "updating dense layers",
)
_EVALUATING = ("evaluating", "computing metrics", "continuing after computing metrics")


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


_LAUNCH = ROOT / "launch.py"
_CONTEXT = multiprocessing.get_context(START_METHOD)
_OUTPUTS = ("stdout", "stderr")


class HangError(AssertionError):
    """A process that has not ended in time."""


@dataclass(frozen=True)
class Ended:
    """How the launcher ended.

    Attributes:
        status: exit status; of a process that a signal ended 128 and its number.
        said: on the console, both streams.
        seconds: it took.
        place: where it was last.
    """

    status: int
    said: str
    seconds: float
    place: object


class Worker:
    """A process that runs the launcher; a new one takes over when it has died.

    Args:
        folder: for what it says.
    """

    def __init__(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._process = None

    @property
    def pid(self):
        return self._process.pid

    @property
    def is_alive(self):
        return self._process is not None and self._process.is_alive()

    @property
    def place(self):
        """Where it is in its run, or was when it died."""
        return place_in(self._folder / "place")

    @property
    def said(self):
        paths = (self._folder / name for name in _OUTPUTS)
        return "".join(path.read_text() for path in paths if path.exists())

    def start(self, arguments, disturbance=nullcontext, environment=None):
        """Begin to run the launcher.

        Args:
            arguments: of the command line.
            disturbance: makes a context that the run happens in; importable.
            environment: variables besides.
        """
        if not self.is_alive:
            self._pipe, theirs = _CONTEXT.Pipe()
            self._process = _CONTEXT.Process(
                target=_serve, args=(theirs, self._folder), daemon=True
            )
            self._process.start()
            # Its end is then seen here.
            theirs.close()
        for name in ("place", *_OUTPUTS):
            (self._folder / name).unlink(missing_ok=True)
        self._since = time.monotonic()
        self._pipe.send((arguments, disturbance, environment or {}))

    def running(self):
        """Whether the launcher has not ended yet."""
        return not self._pipe.poll()

    def end(self, deadline):
        """Wait for the launcher's end.

        Raises:
            HangError: it is not there after so many seconds.
        """
        if not self._pipe.poll(deadline):
            place = self.place
            self.kill()
            raise HangError(f"still running after {deadline} s, {place}:\n{self.said}")
        try:
            status = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode
            status = 128 - code if code < 0 else code
        return Ended(status, self.said, time.monotonic() - self._since, self.place)

    def signal(self, number):
        os.kill(self.pid, number)

    def go_on(self):
        """After a stop."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self):
        """As `kill -9` does."""
        if self._process is not None:
            self._process.kill()
            self._process.join()


def stop(pid):
    """Stop a process and wait until all its threads stand still; False if it is gone."""
    try:
        os.kill(pid, signal.SIGSTOP)
        while True:
            with open(f"/proc/{pid}/stat") as file:
                state = file.read().rpartition(")")[2].split()[0]
            if state in "TtZX":
                return state in "Tt"
            time.sleep(0.0005)
    except (ProcessLookupError, FileNotFoundError):
        return False


def _serve(pipe, folder):
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    # Whoever started the tests may have had it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    while True:
        try:
            arguments, disturbance, environment = pipe.recv()
        except EOFError:
            return
        pipe.send(_launch(folder, arguments, disturbance, environment))


def _launch(folder, arguments, disturbance, environment):
    for number, name in enumerate(_OUTPUTS, 1):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    # What it has said is to be there when it is killed.
    sys.stdout.reconfigure(line_buffering=True)
    before = dict(os.environ)
    os.environ.update(environment)
    sys.argv = [str(_LAUNCH), *map(str, arguments)]
    status = 0
    try:
        with telling(folder / "place"), disturbance():
            runpy.run_path(str(_LAUNCH), run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        # Python would end the process, and with it all its connections.
        traceback.print_exc()
        sys.exit(1)
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        sys.stdout.flush()
        sys.stderr.flush()
    return status


def _launch_watched(folder):
    """As a worker of torchrun: `python -m support.soak.launching FOLDER CONFIG.yaml ...`."""
    sys.argv[0] = str(_LAUNCH)
    with telling(Path(folder) / os.environ["RANK"]):
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _launch_watched(sys.argv.pop(1))
