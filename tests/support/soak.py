"""The launcher on ranks to which something happens, moments at which it may, and soaks' results.

Here also a program, a worker of torchrun: `soak.py DISTURBANCES CONFIG.yaml ...`.
"""

import json
import multiprocessing
import os
import pickle
import re
import runpy
import shutil
import signal
import sys
import time
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from stampede.engine.checkpoint.retention import readable
from stampede.engine.checkpoint.saving import Checkpoints
from stampede.engine.processes import rank_environment
from stampede.engine.start_up import restarts
from stampede.engine.training import trainer
from stampede.engine.watching.heartbeat import Heartbeat
from support.forked import START_METHOD, torchrun
from support.paths import ROOT
from support.stopping import Setting, before_step
from support.waiting import HANG

STAGES = ("start", "training", "evaluation", "save")
# Beats of a step that is not taken yet.
_TAKING = (
    "looking up",
    "computing",
    "adding up the loss",
    "updating tables",
    "updating dense layers",
)
_EVALUATING = ("evaluating", "computing metrics", "continuing after computing metrics")
# What a process says before it is killed.
KILLED = "killed by the soak\n"
_CONTINUED = re.compile(r"continuing after step ([\d,]+) from")


@dataclass(frozen=True)
class Moment:
    """When something happens to a process.

    Attributes:
        rank: of the process.
        stage: one of `STAGES`; None: at any time.
        skip: how often that stage is passed by first.
        delay: seconds from its beginning, or from that of the process; halved if the stage is over.
    """

    rank: int
    stage: str | None
    skip: int
    delay: float

    def sooner(self):
        """About halfway there."""
        return replace(self, skip=self.skip // 2, delay=self.delay / 2)


def random_moment(draw, stage, seconds=0, ranks=1):
    """A moment in a stage, or with None at any time of a run of so many seconds."""
    rank = draw.randrange(ranks)
    if stage is None:
        return Moment(rank, None, 0, draw.uniform(0, seconds))
    longest = {"start": 0.5, "training": 0.01, "evaluation": 0.02, "save": 0.02}[stage]
    # A start happens once.
    skip = 0 if stage == "start" else draw.randrange(4)
    return Moment(rank, stage, skip, draw.uniform(0, longest))


class Place:
    """Where this process is in its run.

    Attributes:
        done: steps of the run that were taken; None before the first one of this start. It is
            written to a file, which outlives the process.
        listener: is called when a stage may have begun.
    """

    # Of this process.
    here = None

    def __init__(self, path):
        Place.here = self
        self.done, self.listener = None, lambda: None
        self._stage, self._is_saving = "start", False
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        beat, write = Heartbeat.beat, Checkpoints._write

        def beat_and_tell(heartbeat, stage, step=None):
            beat(heartbeat, stage, step)
            if heartbeat.step:
                self.done = heartbeat.step - (stage in _TAKING)
                os.pwrite(file, f"{self.done:<9}".encode(), 0)
            self._stage = "evaluation" if stage in _EVALUATING else "training"
            self.listener()

        def write_and_tell(*arguments):
            self._is_saving = True
            self.listener()
            try:
                write(*arguments)
            finally:
                self._is_saving = False

        Heartbeat.beat, Checkpoints._write = beat_and_tell, write_and_tell

    @property
    def stages(self):
        """One of `STAGES`, and `save` while a checkpoint is being written."""
        return [self._stage, *(["save"] if self._is_saving else [])]

    def is_in(self, stage):
        return stage is None or stage in self.stages

    @contextmanager
    def at(self, moment, action):
        """Call something in a thread at a moment, again where it returns True."""
        seen, before, delay, is_waiting = 0, False, moment.delay, False

        def wait_and_act():
            nonlocal delay, is_waiting
            time.sleep(delay)
            if not self.is_in(moment.stage) or action():
                # It was too long for the stage.
                delay, is_waiting = delay / 2, False

        def look():
            nonlocal seen, before, is_waiting
            now = self.is_in(moment.stage)
            if now and not before:
                if seen >= moment.skip and not is_waiting:
                    is_waiting = True
                    Thread(target=wait_and_act, daemon=True).start()
                seen += 1
            before = now

        self.listener = look
        look()
        yield


@contextmanager
def at_step(step, action, *arguments):
    """Call something before a step; 0: at once."""
    if step == 0:
        action(*arguments)
    before_step(Setting, step, lambda: action(*arguments))
    yield


def sleep_in_python():
    time.sleep(3600)


def slow_down():
    """From here on each step takes a while."""
    step = trainer.train_step

    def slow(*arguments):
        time.sleep(0.5)
        return step(*arguments)

    trainer.train_step = slow


def dying(moment, folder, run):
    """A context in which this process is killed at a moment, and leaves what was found."""
    return Place.here.at(moment, partial(_die, moment.stage, folder, run))


def _die(stage, folder, run):
    place, found = Place.here, newest_step(run) or 0
    stages, done = place.stages, place.done
    # If no step was taken since the kill before, that one has lost what there was to lose.
    kill = {"stages": stages, "done": found if done is None else done, "newest": found}
    if not place.is_in(stage):
        # Finding all that took too long.
        return True
    with (folder / "kills").open("a") as file:
        file.write(json.dumps(kill) + "\n")
    os.write(1, KILLED.encode())
    os.kill(os.getpid(), signal.SIGKILL)


def kills_of(folder):
    """What the killed processes have left, one after the other."""
    file = folder / "kills"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@dataclass(frozen=True)
class Ended:
    """How the launcher ended.

    Attributes:
        status: exit status; of a process that a signal ended 128 and its number.
        said: on the console, both streams.
        seconds: it took.
        done: see `Place`.
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
        self._folder, self._begun, self._processes = folder, time.monotonic(), []
        for rank in range(ranks):
            environment = rank_environment(rank, ranks, folder / "store") if ranks > 1 else {}
            within = disturbance if rank == disturbed else nullcontext
            given = (folder, rank, list(map(str, arguments)), within, environment)
            context = multiprocessing.get_context(START_METHOD)
            self._processes.append(context.Process(target=_launch, args=given, daemon=True))
            self._processes[-1].start()

    @property
    def said(self):
        """On the console, all ranks and both streams."""
        return "".join(path.read_text() for path in sorted(self._folder.glob("*.said")))

    @property
    def pid(self):
        """Of rank 0."""
        return self._processes[0].pid

    def end(self):
        """How all ranks ended, at the latest when one was killed; their statuses are the same."""
        while any(process.is_alive() for process in self._processes):
            is_killed = -signal.SIGKILL in self._codes()
            if is_killed or time.monotonic() > self._begun + HANG:
                for process in self._processes:
                    process.kill()
                    process.join()
                assert is_killed, f"still running after {HANG} s:\n{self.said}"
            time.sleep(0.005)
        seconds, codes = time.monotonic() - self._begun, self._codes()
        statuses = {-signal.SIGKILL} if -signal.SIGKILL in codes else codes
        assert len(statuses) == 1, (statuses, self.said)
        (code,) = statuses
        place = self._folder / "0.place"
        done = place.read_text() if place.exists() else ""
        status = 128 - code if code < 0 else code
        return Ended(status, self.said, seconds, int(done) if done else None)

    def _codes(self):
        return {process.exitcode for process in self._processes} - {None}


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
    Place(folder / f"{rank}.place")
    with disturbance():
        _run_launcher(arguments)


def _run_launcher(arguments):
    sys.argv = [str(ROOT / "launch.py"), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def disturbed_torchrun(folder, disturbances, arguments, ranks, restarts, **options):
    """The launcher in workers of torchrun; options are those of `support.forked.torchrun`.

    Args:
        disturbances: each a rank, numbers of its starts, from 0, and what makes a context.
    """
    file = folder / "disturbances"
    file.write_bytes(pickle.dumps(disturbances))
    return torchrun(Path(__file__), [file, *arguments], ranks, restarts, **options)


def work(file, *arguments):
    """As a worker of torchrun."""
    rank, file = int(os.environ["RANK"]), Path(file)
    Place(file.with_name(f"{rank}.place"))
    with ExitStack() as within:
        for of_rank, starts, disturbance in pickle.loads(file.read_bytes()):
            if of_rank == rank and restarts() in starts:
                within.enter_context(disturbance())
        _run_launcher(arguments)


def continued_after(said):
    """Steps that runs went on after, in the order they said so."""
    return [int(step.replace(",", "")) for step in _CONTINUED.findall(said)]


def newest_step(run):
    """Steps in the newest checkpoint that has its name; None without one."""
    return next((progress.step for _, progress in readable(run / "checkpoints")), None)


def write_results(name, what, found):
    """Write `NAME.json` and `NAME.md` into `STAMPEDE_SOAK_RESULTS`, by default `cache/soak`.

    Args:
        what: heading of the first column.
        found: by name of a row, its values by heading.
    """
    # The benchmarks are scripts, which find each other in their own folder.
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from machine import describe_machine
    from report import markdown

    folder = Path(os.environ.get("STAMPEDE_SOAK_RESULTS", ROOT / "cache/soak"))
    folder.mkdir(parents=True, exist_ok=True)
    report = {"machine": describe_machine(), what: found}
    (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    headings = list(next(iter(found.values())))
    rows = [[row, *values.values()] for row, values in found.items()]
    together = [
        (max if "most" in heading or "longest" in heading else sum)(column)
        for heading, column in zip(headings, list(zip(*rows, strict=True))[1:], strict=True)
    ]
    lines = [list(map(str, line)) for line in [*rows, ["together", *together]]]
    text = markdown([what, *headings], lines)
    (folder / f"{name}.md").write_text(text + "\n")


if __name__ == "__main__":
    # Disturbances know the module by this name.
    from support import soak

    soak.work(*sys.argv[1:])
