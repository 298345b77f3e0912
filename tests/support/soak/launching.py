"""The launcher in processes that tell where they are and may be killed; here also a program."""

import contextlib
import multiprocessing
import os
import runpy
import shutil
import signal
import struct
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from stampede.engine.heartbeat import Heartbeat
from stampede.engine.processes import rank_environment
from support.forked import START_METHOD
from support.paths import ROOT
from support.waiting import HANG

_LAUNCH = ROOT / "launch.py"
_RECORD = struct.Struct("<qq40s")

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
        step: that is being taken or was taken last; 0 before the first one of this start.
        stage: of it.
    """

    pid: int
    step: int
    stage: str

    @property
    def done(self):
        """Steps of the run that were taken; None before the first one of this start."""
        if not self.step:
            return None
        return self.step - 1 if self.stage in _TAKING else self.step


def tell(path):
    """From now on write every beat of this process to a file, which outlives it."""
    file, beat = os.open(path, os.O_WRONLY | os.O_CREAT), Heartbeat.beat

    def write(step, stage):
        os.pwrite(file, _RECORD.pack(os.getpid(), step, stage.encode()), 0)

    def beat_and_tell(self, stage, step=None):
        beat(self, stage, step)
        write(self.step, self.stage)

    write(0, "starting")
    Heartbeat.beat = beat_and_tell


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


class HangError(AssertionError):
    """A process that has not ended in time."""


@dataclass(frozen=True)
class Ended:
    """How the launcher ended.

    Attributes:
        status: exit status; of a process that a signal ended 128 and its number.
        said: on the console, both streams.
        seconds: it took.
        done: see `Place.done`.
    """

    status: int
    said: str
    seconds: float
    done: int | None


class Launched:
    """The launcher on some ranks, each a process that is forked.

    Args:
        folder: for what they say.
        arguments: of the launcher.
        ranks: how many.
        disturbance: makes a context that a run happens in; importable.
        disturbed: the rank that it happens to.
    """

    def __init__(self, folder, arguments, ranks=1, disturbance=nullcontext, disturbed=0):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.ranks = ranks
        self._folder, self._begun = folder, time.monotonic()
        self._start(list(map(str, arguments)), disturbance, disturbed)

    def _start(self, arguments, disturbance, disturbed):
        context = multiprocessing.get_context(START_METHOD)
        self._processes = []
        for rank in range(self.ranks):
            store = self._folder / "store"
            environment = rank_environment(rank, self.ranks, store) if self.ranks > 1 else {}
            within = disturbance if rank == disturbed else nullcontext
            given = (self._folder, rank, arguments, within, environment)
            self._processes.append(context.Process(target=_launch, args=given, daemon=True))
            self._processes[-1].start()

    @property
    def said(self):
        """On the console, all ranks and both streams."""
        return "".join(path.read_text() for path in sorted(self._folder.glob("*.said")))

    def pid(self, rank=0):
        """Of a rank's process."""
        return self._processes[rank].pid

    def place(self, rank=0):
        """Where a rank is, or was when it died; None if it has told nothing yet."""
        path = self._folder / f"{rank}.place"
        content = path.read_bytes() if path.exists() else b""
        if not content:
            return None
        pid, step, stage = _RECORD.unpack(content)
        return Place(pid, step, stage.rstrip(b"\0").decode())

    def running(self):
        """Whether the launcher has not ended yet."""
        return any(process.is_alive() for process in self._processes)

    def is_new(self, gone):
        """Whether all ranks are there, and none of their processes is one of these."""
        return True

    def end(self):
        """How all ranks ended; their statuses must be the same.

        Raises:
            HangError: they have not.
        """
        while self.running():
            if time.monotonic() > self._begun + HANG:
                self.kill()
                raise HangError(f"still running after {HANG} s, {self.place()}:\n{self.said}")
            time.sleep(0.005)
        seconds, place = time.monotonic() - self._begun, self.place()
        statuses = {128 - code if code < 0 else code for code in self._codes()}
        assert len(statuses) == 1, (statuses, self.said)
        return Ended(statuses.pop(), self.said, seconds, place and place.done)

    def _codes(self):
        return [process.exitcode for process in self._processes]

    def kill(self):
        """As `kill -9` does, all ranks."""
        for process in self._processes:
            process.kill()
            process.join()


class Torchrun(Launched):
    """A `torchrun --max-restarts` with the launcher."""

    def _start(self, arguments, *_):
        environment = {
            name: os.environ[name] for name in os.environ.keys() - {"RANK", "WORLD_SIZE"}
        }
        environment |= {
            "PYTHONPATH": str(ROOT / "tests"),
            # What workers have said is to be there when they are killed.
            "PYTHONUNBUFFERED": "1",
            # Seconds that torchrun gives the other workers to end.
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
        }
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc_per_node", str(self.ranks), "--max-restarts", "1000",
            "-m", "support.soak.launching", str(self._folder), *arguments,
        ]  # fmt: skip
        with (self._folder / "torchrun.said").open("a") as said:
            self._process = subprocess.Popen(
                command, stdout=said, stderr=said, env=environment, cwd=ROOT
            )

    def pid(self, rank=0):
        return self.place(rank).pid

    def is_new(self, gone):
        places = map(self.place, range(self.ranks))
        return all(place is not None and place.pid not in gone for place in places)

    def running(self):
        return self._process.poll() is None

    def _codes(self):
        return [self._process.returncode]

    def kill(self):
        """Also workers that it has started and that tell nothing yet."""
        if self.running():
            self._process.send_signal(signal.SIGSTOP)
            for pid in _descendants(self._process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()


def stop(pid):
    """Stop a process and wait until all its threads stand still; False if it is gone."""
    try:
        os.kill(pid, signal.SIGSTOP)
        while (state := _stat(pid)[0]) not in "TtZX":
            time.sleep(0.0005)
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state in "Tt"


def _stat(pid):
    """State, parent and more, see proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _descendants(pid):
    children = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            children.setdefault(int(_stat(path.name)[1]), []).append(int(path.name))
    found = []
    for child in children.get(pid, []):
        found += [child, *_descendants(child)]
    return found


def _launch(folder, rank, arguments, disturbance, environment):
    said = os.open(folder / f"{rank}.said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(said, number)
    # What it has said is to be there when it is killed.
    sys.stdout.reconfigure(line_buffering=True)
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    # Whoever started the tests may have had it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    tell(folder / f"{rank}.place")
    sys.argv = [str(_LAUNCH), *arguments]
    with disturbance():
        runpy.run_path(str(_LAUNCH), run_name="__main__")


def _launch_watched(folder):
    """As a worker of torchrun: `python -m support.soak.launching FOLDER CONFIG.yaml ...`."""
    sys.argv[0] = str(_LAUNCH)
    tell(Path(folder) / f"{os.environ['RANK']}.place")
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _launch_watched(sys.argv.pop(1))
