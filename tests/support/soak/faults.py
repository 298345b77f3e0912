"""Faults: how each is injected into a run, what the user then sees, and how it is mended.

A kind is a context: it injects the fault into a `Case`, gives how the launcher is to meet it, and
mends it at its end.
"""

import os
import re
import shutil
import signal
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

from stampede.engine.checkpoint import newest
from stampede.engine.config import config_type
from stampede.engine.processes import rank_environment
from stampede.settings import all_keys
from support.reading import OVERRIDES, prepared
from support.soak.disturbances import (
    at_step,
    disk_filling_up,
    end_process,
    lines_behind_a_link,
    poisoned,
    raise_an_error,
    read_only_from,
    short_files,
    sleep_in_python,
    take_memory_of_numpy,
    take_memory_of_torch,
)
from support.soak.killing import random_moment, reached
from support.soak.launching import Ended, Worker
from support.soak.runs import continued_after, newest_step, same_end
from support.waiting import HANG

# The last batch of an epoch has one sample, so that it is empty on all ranks but the first.
STEPS_AN_EPOCH, EPOCHS, EVERY = 11, 3, 4
STEPS = STEPS_AN_EPOCH * EPOCHS
_ROWS = 64 * (STEPS_AN_EPOCH - 1) + 1

JOB = [
    *OVERRIDES, f"train.epochs={EPOCHS}", "train.log_every=2", "evaluate.every=7",
    f"checkpoint.every_steps={EVERY}", "checkpoint.keep=3", "checkpoint.resume=auto",
    "sharding.plan=row_wise",
]  # fmt: skip

# The run that faults find has been killed after this step; steps 11, 12 and 16 are saved.
STOPPED_AFTER = 18


class Processes:
    """One process of a run or several, each a `Worker`.

    Args:
        folder: for what they say.
        ranks: how many.
    """

    def __init__(self, folder, ranks):
        self._store = folder / f"store_{ranks}"
        self.workers = [Worker(folder / f"{ranks}_{rank}") for rank in range(ranks)]

    def start(self, arguments, disturbance=nullcontext, rank=0):
        """Begin to run the launcher, disturbed on one rank."""
        if not all(worker.is_alive for worker in self.workers):
            # As torchrun does: torch's process groups of a process are numbered since it began.
            self.close()
        ranks = len(self.workers)
        for other, worker in enumerate(self.workers):
            worker.start(
                arguments,
                disturbance if other == rank else nullcontext,
                rank_environment(other, ranks, self._store) if ranks > 1 else {},
            )

    def end(self, deadline=HANG):
        """How all of them ended; their statuses must be the same."""
        try:
            ended = [worker.end(deadline) for worker in self.workers]
        except AssertionError:
            self.close()
            raise
        said = "".join(one.said for one in ended)
        statuses = {one.status for one in ended}
        assert len(statuses) == 1, (statuses, said)
        seconds = max(one.seconds for one in ended)
        return Ended(statuses.pop(), said, seconds, ended[0].place)

    def close(self):
        for worker in self.workers:
            worker.kill()


@dataclass
class Base:
    """What all cases share.

    Attributes:
        folder: for everything.
        processes: by number of ranks.
        second: a process besides.
    """

    folder: Path
    processes: dict[int, Processes] = field(default_factory=dict)
    _undisturbed: dict[int, Path] = field(default_factory=dict)

    def __post_init__(self):
        self.second = Processes(self.folder / "second", 1)
        prepared(self.folder / "data", train=_ROWS)
        self.job = self.folder / "small.yaml"
        self.job.write_text("")
        arguments = self.arguments(self.folder / "data", self.folder / "stopped")
        stopping = partial(at_step, STOPPED_AFTER + 1, end_process)
        ranks = self.of(1)
        ranks.start([*arguments, "checkpoint.asynchronous=false"], stopping)
        assert ranks.end().status == 137
        assert newest_step(self.folder / "stopped/small") == 16

    def arguments(self, data, runs):
        return [self.job, "data.kind=prepared", f"data.path={data}", f"run.dir={runs}", *JOB]

    def of(self, ranks):
        """Processes that are there already."""
        if ranks not in self.processes:
            self.processes[ranks] = Processes(self.folder / "said", ranks)
        return self.processes[ranks]

    def undisturbed(self, ranks):
        """The run that nothing happened to."""
        if ranks not in self._undisturbed:
            runs = self.folder / f"undisturbed_{ranks}"
            self.of(ranks).start(self.arguments(self.folder / "data", runs))
            ended = self.of(ranks).end()
            assert ended.status == 0, ended.said
            self._undisturbed[ranks] = runs / "small"
        return self._undisturbed[ranks]

    def close(self):
        for processes in (*self.processes.values(), self.second):
            processes.close()


@dataclass
class Case:
    """A run of its own, to which one fault happens.

    Args:
        base: what all share.
        number: of the case.
        ranks: processes.
        begun: whether the run has been stopped after `STOPPED_AFTER` steps; else it is to begin.
    """

    base: Base
    number: str
    ranks: int
    begun: bool

    def __post_init__(self):
        self.draw = Random(self.number)
        self.folder = self.base.folder / "case"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.data = Path(shutil.copytree(self.base.folder / "data", self.folder / "data"))
        self.runs = self.folder / "runs"
        if self.begun:
            shutil.copytree(self.base.folder / "stopped", self.runs)
        else:
            self.runs.mkdir()
        self.run = self.runs / "small"
        self.processes = self.base.of(self.ranks)
        self.second = self.base.second

    @property
    def worker(self):
        """The process of rank 0."""
        return self.processes.workers[0]

    @property
    def checkpoint(self):
        """The newest one."""
        return newest(self.run / "checkpoints")

    def arguments(self, *overrides):
        return [*self.base.arguments(self.data, self.runs), *overrides]

    def a_step(self, first=2):
        """A step that this run has yet to take."""
        return self.draw.randrange(STOPPED_AFTER + first if self.begun else first, STEPS)

    def a_file(self, folder, pattern="*"):
        """One of the files of a folder."""
        return self.draw.choice(sorted(path for path in folder.glob(pattern) if path.is_file()))

    def check_end(self):
        """Check that the run has come to the same as the undisturbed one."""
        same_end(self.run, self.base.undisturbed(self.ranks))


DAMAGES = ("truncated", "flipped", "vanished")


def damage(path, how, draw):
    """Cut a file at a random place, flip one of its bits, or delete it."""
    if how == "vanished":
        path.unlink()
        return
    content = bytearray(path.read_bytes())
    at = draw.randrange(len(content))
    if how == "truncated":
        del content[at:]
    else:
        content[at] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


@contextmanager
def mended(folder):
    """What happens to a folder within it is undone after it, times included."""
    aside = folder.with_name(f"{folder.name} as it was")
    shutil.copytree(folder, aside)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(aside, folder)


KINDS = {}


@dataclass(frozen=True)
class Meeting:
    """How the launcher meets a fault.

    Attributes:
        says: pattern of what it must say.
        overrides: of the configuration.
        disturbance: of the process of a rank.
        rank: that one.
        meanwhile: is called while it runs; what it returns is how the launcher that met the fault
            has ended, if it is another one.
    """

    says: str
    overrides: tuple = ()
    disturbance: object = nullcontext
    rank: int = 0
    meanwhile: object = None


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        inject: the context.
        times: how often the soak injects it.
        status: that the launcher must end with.
        begun: whether the run has been begun before, see `Case`.
        ranks: processes.
        traceback: whether one is as it should be: nobody foresees a mistake in the program.
        loses: whether steps may have to be done again.
        needs_disk: whether the process needs a disk of its own.
    """

    inject: object
    times: int
    status: int
    begun: bool = False
    ranks: int = 1
    traceback: bool = False
    loses: bool = True
    needs_disk: bool = False


def kind(name, times, status, **more):
    """Register a context as a kind, see `Kind`."""

    def register(inject):
        KINDS[name] = Kind(contextmanager(inject), times, status, **more)
        return inject

    return register


@dataclass(frozen=True)
class Outcome:
    """What a fault has cost.

    Attributes:
        again: steps that were done again.
        seconds: until the launcher ended that met it.
    """

    again: int
    seconds: float


def inject(kind, base, number):
    """Let a fault happen to a run of its own, mend it, and let the run come to its end.

    Raises:
        AssertionError: something was not as promised.
    """
    case = Case(base, number, kind.ranks, kind.begun)
    done = STOPPED_AFTER if kind.begun else 0
    with kind.inject(case) as meeting:
        case.processes.start(case.arguments(*meeting.overrides), meeting.disturbance, meeting.rank)
        met = meeting.meanwhile(case.processes) if meeting.meanwhile else None
        ended = case.processes.end()
    met = met or ended
    assert met.status == kind.status, (met.status, met.said)
    assert re.search(meeting.says, met.said), (meeting.says, met.said)
    assert ("Traceback" in met.said) == kind.traceback, met.said
    again = _again(done, ended.said)
    if ended.status != 0:
        if ended.place is not None and ended.place.done is not None:
            done = ended.place.done
        saved = newest_step(case.run) or 0
        case.processes.start(case.arguments())
        ended = case.processes.end()
        assert ended.status == 0 and "Traceback" not in ended.said, ended.said
        assert continued_after(ended.said) == ([saved] if saved else []), ended.said
        assert kind.loses or saved == done
        again = max(again, done - saved)
    case.check_end()
    # A checkpoint may be written while the next steps are taken, and one may be damaged.
    assert 0 <= again <= 3 * EVERY
    return Outcome(again, met.seconds)


def _again(done, said):
    """Steps that a run did again that had come so far."""
    return max((done - step for step in continued_after(said)), default=0)


@kind("checkpoint truncated", 14, 0, begun=True)
def checkpoint_truncated(case):
    yield from _newest_checkpoint_damaged(case, "truncated")


@kind("bit of a checkpoint flipped", 20, 0, begun=True)
def checkpoint_flipped(case):
    yield from _newest_checkpoint_damaged(case, "flipped")


@kind("file of a checkpoint vanished", 8, 0, begun=True)
def checkpoint_vanished(case):
    yield from _newest_checkpoint_damaged(case, "vanished")


def _newest_checkpoint_damaged(case, how):
    path = case.checkpoint
    damage(case.a_file(path), how, case.draw)
    yield Meeting(rf"{path.name}: damaged checkpoint \(.*\n  set aside as .* is used")


@kind("all checkpoints damaged", 6, 2, begun=True)
def all_checkpoints_damaged(case):
    with mended(case.run):
        for path in (case.run / "checkpoints").iterdir():
            damage(case.a_file(path), case.draw.choice(DAMAGES), case.draw)
        yield Meeting(r"damaged checkpoint \((.|\n)*no other checkpoint is left in")


@kind("key misspelled", 12, 2, begun=True)
def key_misspelled(case):
    known = [key.path for key in all_keys(config_type())]
    key = case.draw.choice(known)
    while key in known:
        key = list(case.draw.choice(known))
        place = case.draw.randrange(len(key))
        key[place : place + case.draw.randrange(2)] = case.draw.choice("abcdefghijklmnopqrstuvwxyz")
        key = "".join(key)
    yield Meeting(re.escape(key.split(".")[0]), (f"{key}=1",))


@kind("key changed that may not be", 8, 2, begun=True)
def key_changed(case):
    changed = case.draw.choice([
        "model.dim=7", "model.hidden=[8]", "model.name=lr", "train.batch_size=63", "run.seed=9",
        "optim.embedding.l2=0.5", "optim.embedding.optimizer=sgd", "optim.scaling.rule=linear",
        "optim.dense.betas=[0.8,0.9]", "evaluate.select_on=validation",
    ])  # fmt: skip
    yield Meeting(r"cannot be continued|select_on", (changed,))


@kind("data file vanished", 14, 2, begun=True)
def data_file_vanished(case):
    with mended(case.data):
        path = case.a_file(case.data)
        path.unlink()
        yield Meeting(rf"({re.escape(path.name)}: No such file|no prepared data here)")


@kind("data shard changed", 14, 2, begun=True)
def data_shard_changed(case):
    with mended(case.data):
        path = case.a_file(case.data, "*.npy")
        damage(path, "flipped", case.draw)
        yield Meeting(rf"{re.escape(path.name)}: its content has changed \(SHA-256 differs\)")


@kind("data shard truncated", 6, 2, begun=True)
def data_shard_truncated(case):
    with mended(case.data):
        path = case.a_file(case.data, "*.npy")
        damage(path, "truncated", case.draw)
        yield Meeting(rf"{re.escape(path.name)}: ")


# Seconds without progress that are a hang; far more than a step takes.
_PATIENCE = 4


@kind("stopped in a step in which a rank has no sample", 4, 143, ranks=2, loses=False)
def rank_without_samples(case):
    step = case.draw.choice([1, 2]) * STEPS_AN_EPOCH
    yield Meeting(
        f"stopped by SIGTERM after step {step}, which is saved",
        disturbance=partial(at_step, step, signal.raise_signal, signal.SIGTERM),
        rank=case.draw.randrange(case.ranks),
    )


@kind("SIGTERM", 14, 143, loses=False)
def sigterm(case):
    yield _signalled(case, signal.SIGTERM)


@kind("SIGINT", 14, 130, loses=False)
def sigint(case):
    yield _signalled(case, signal.SIGINT)


def _signalled(case, number):
    stage = case.draw.choice(["start", "training", "training", "evaluation", "save"])
    moment = random_moment(case.draw, stage, 0)

    def send(processes):
        worker = processes.workers[0]
        if stage == "start":
            # The launcher has begun; before, it is Python that the signal meets.
            lock, begun = case.runs / ".small.lock", time.monotonic()
            while not (lock.exists() and lock.read_text().strip() == str(worker.pid)):
                assert time.monotonic() < begun + HANG
                time.sleep(0.001)
            time.sleep(moment.delay / 5)
            worker.signal(number)
        else:
            assert reached(worker, case.run, moment)
            worker.signal(number)
            worker.go_on()

    return Meeting("", meanwhile=send)


@kind("kill -9", 8, 137)
def killed(case):
    yield Meeting("", disturbance=partial(at_step, case.a_step(), end_process))


@kind("process that hangs", 4, 3)
def hang(case):
    yield Meeting(
        "the run hangs: rank 0 makes no progress: .*in sleep_in_python",
        (f"run.hang_seconds={_PATIENCE}",),
        partial(at_step, case.a_step(3), sleep_in_python),
    )


@kind("rank that hangs", 2, 3, ranks=2)
def rank_that_hangs(case):
    yield Meeting(
        "the run hangs: rank 1 makes no progress: .*in sleep_in_python",
        (f"run.hang_seconds={_PATIENCE}",),
        partial(at_step, case.a_step(3), sleep_in_python),
        rank=1,
    )


@kind("exception in a rank", 4, 1, ranks=2, traceback=True)
def exception_in_a_rank(case):
    yield Meeting(
        r"KeyError: 'a fault of this test'(.|\n)*connection to another rank is lost|"
        r"connection to another rank is lost(.|\n)*KeyError: 'a fault of this test'",
        disturbance=partial(at_step, case.a_step(), raise_an_error),
        rank=case.draw.randrange(2),
    )


@kind("second job in the same folder", 8, 2)
def second_job(case):
    moment = random_moment(case.draw, case.draw.choice(["training", "evaluation"]), 0)

    def start(processes):
        first = processes.workers[0]
        assert reached(first, case.run, moment)
        try:
            case.second.start(case.arguments())
            return case.second.end()
        finally:
            first.go_on()

    yield Meeting("is being written by another run", meanwhile=start)


@kind("disk full", 14, 1, begun=True, needs_disk=True)
def disk_full(case):
    """No checkpoint fits on it any more, and perhaps not even a line."""
    size = sum(path.stat().st_size for path in case.checkpoint.iterdir())
    free = case.draw.choice([case.draw.randrange(16384), case.draw.randrange(size)])
    yield Meeting(
        "No space left on device",
        disturbance=partial(disk_filling_up, case.a_step(1), case.runs, free),
    )


@kind("disk full from the start", 6, 1, begun=True, needs_disk=True)
def disk_full_from_the_start(case):
    free = case.draw.choice([0, case.draw.randrange(16384)])
    yield Meeting(
        "No space left on device", disturbance=partial(disk_filling_up, 0, case.runs, free)
    )


@kind("log made a link", 8, 1)
def log_made_a_link(case):
    yield Meeting(
        r"results cannot be written \(is a link, which is not followed\)",
        disturbance=partial(lines_behind_a_link, case.a_step(), case.run),
    )


@kind("file size limited", 10, 1, begun=True)
def file_size_limited(case):
    largest = max(path.stat().st_size for path in case.checkpoint.iterdir())
    # What this process says goes into files as well.
    most = case.draw.randrange(30_000, largest)
    yield Meeting("File too large", disturbance=partial(short_files, case.a_step(1), most))


@kind("folder read-only from the start", 6, 2, begun=True)
def read_only_from_the_start(case):
    folder = case.draw.choice([case.run, case.run / "checkpoints"])
    yield Meeting("Permission denied", disturbance=partial(read_only_from, 0, folder))


@kind("folder read-only from a step on", 10, 1, begun=True)
def read_only_from_a_step_on(case):
    folder = case.draw.choice([case.run, case.run / "checkpoints"])
    disturbance = partial(read_only_from, case.draw.randrange(19, STEPS - 9), folder)
    yield Meeting("Permission denied", disturbance=disturbance)


@kind("number of a batch not finite", 14, 1)
def number_not_finite(case):
    step, value = case.a_step(), case.draw.choice([float("nan"), float("inf"), -float("inf")])
    yield Meeting(
        rf"at step {step}; this step changed no weights",
        disturbance=partial(poisoned, step, value),
        rank=case.draw.randrange(case.ranks),
    )


@kind("out of memory", 8, 1)
def out_of_memory(case):
    take = case.draw.choice([take_memory_of_torch, take_memory_of_numpy])
    yield Meeting("memory", disturbance=partial(at_step, case.a_step(), take))
