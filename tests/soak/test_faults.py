"""Runs that meet a fault end with a sentence and a status, and go on once it is mended.

`make soak` injects hundreds of faults, `make wide` one of each of two kinds. A kind is a context:
it injects the fault into a `Case`, gives how the launcher is to meet it, and mends it at its end.
"""

import ctypes
import os
import re
import shutil
import signal
import subprocess
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from threading import Lock

import numpy as np
import pytest
import torch

from stampede.engine.checkpoint.retention import newest
from stampede.engine.checkpoint.saving import Checkpoints
from support.jobs import same_end
from support.permissions import read_only
from support.reading import OVERRIDES, prepared
from support.soak import (
    Launched,
    Place,
    at_step,
    continued_after,
    newest_step,
    random_moment,
    sleep_in_python,
    write_results,
)
from support.stopping import Setting, poisoned
from support.waiting import wait_for

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


class Base:
    """What all cases share: the data, a run that was killed, and runs that nothing happened to."""

    def __init__(self, folder):
        self.folder = folder
        prepared(folder / "data", train=_ROWS)
        (folder / "small.yaml").write_text("")
        killing = partial(at_step, STOPPED_AFTER + 1, signal.raise_signal, signal.SIGKILL)
        launched = self.launch("stopped", "checkpoint.asynchronous=false", disturbance=killing)
        assert launched.end().status == 137
        assert newest_step(folder / "stopped/small") == 16

    def launch(self, runs, *overrides, data="data", said="said", **options):
        data, runs = self.folder / data, self.folder / runs
        arguments = [
            self.folder / "small.yaml", "data.kind=prepared", f"data.path={data}",
            f"run.dir={runs}", *JOB, *overrides,
        ]  # fmt: skip
        return Launched(self.folder / said, arguments, **options)

    def undisturbed(self, ranks):
        """The run that nothing happened to."""
        run = self.folder / f"undisturbed_{ranks}/small"
        if not run.exists():
            ended = self.launch(run.parent, ranks=ranks).end()
            assert ended.status == 0, ended.said
        return run


class Case:
    """A run of its own, to which one fault happens; see `Kind`."""

    def __init__(self, base, kind, number):
        self.base, self.kind, self.draw = base, kind, Random(number)
        folder = base.folder / "case"
        shutil.rmtree(folder, ignore_errors=True)
        self.data = Path(shutil.copytree(base.folder / "data", folder / "data"))
        self.runs = folder / "runs"
        if kind.begun:
            shutil.copytree(base.folder / "stopped", self.runs)
        else:
            self.runs.mkdir()
        self.run = self.runs / "small"

    def launch(self, *overrides, **options):
        given = {"data": self.data, "ranks": self.kind.ranks, **options}
        return self.base.launch(self.runs, *overrides, **given)

    def a_step(self, first=2):
        """A step that this run has yet to take."""
        return self.draw.randrange(STOPPED_AFTER + first if self.kind.begun else first, STEPS)

    def damage(self, folder, how, pattern="*"):
        """Cut a file of a folder at a random place, flip one of its bits, or delete it; its name.

        What happens to data is undone by `mended`.
        """
        path = self.draw.choice(sorted(path for path in folder.glob(pattern) if path.is_file()))
        content = bytearray(path.read_bytes())
        at = self.draw.randrange(len(content))
        if how == "truncated":
            path.write_bytes(content[:at])
        elif how == "flipped":
            content[at] ^= 1 << self.draw.randrange(8)
            path.write_bytes(content)
        else:
            path.unlink()
        return path.name


DAMAGES = ("truncated", "flipped", "vanished")


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


@dataclass(frozen=True)
class Fault:
    """How the launcher meets a fault.

    Attributes:
        status: that it must end with.
        says: pattern of what it must say.
        overrides: of the configuration.
        disturbance: of the process of a rank.
        disturbed: that rank.
        meanwhile: is called while it runs; what it returns is how the launcher that met the fault
            has ended, if it is another one.
        loses: whether steps may have to be done again.
        traceback: whether one is as it should be: nobody foresees a mistake in the program.
    """

    status: int
    says: str = ""
    overrides: tuple = ()
    disturbance: object = nullcontext
    disturbed: int = 0
    meanwhile: object = None
    loses: bool = True
    traceback: bool = False


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        inject: makes the context of a `Case`.
        times: how often the soak injects it.
        begun: whether the run has been stopped after `STOPPED_AFTER` steps; else it is to begin.
        ranks: processes.
    """

    inject: object
    times: int
    begun: bool = False
    ranks: int = 1


KINDS = {}


def kind(name, times, **more):
    """Register a context as a kind, see `Kind`."""

    def register(inject):
        KINDS[name] = Kind(contextmanager(inject), times, **more)
        return inject

    return register


def inject(kind, base, number):
    """Let a fault happen to a run of its own, mend it, and let the run come to its end.

    Returns:
        Steps that were done again, and seconds until the launcher ended that met the fault.

    Raises:
        AssertionError: something was not as promised.
    """
    case = Case(base, kind, number)
    done = STOPPED_AFTER if kind.begun else 0
    with kind.inject(case) as fault:
        launched = case.launch(
            *fault.overrides, disturbance=fault.disturbance, disturbed=fault.disturbed
        )
        met = fault.meanwhile(launched) if fault.meanwhile else None
        ended = launched.end()
    met = met or ended
    assert met.status == fault.status, (met.status, met.said)
    assert re.search(fault.says, met.said), (fault.says, met.said)
    assert ("Traceback" in met.said) == fault.traceback, met.said
    again = max((done - step for step in continued_after(ended.said)), default=0)
    if ended.status != 0:
        done = done if ended.done is None else ended.done
        saved = newest_step(case.run) or 0
        ended = case.launch().end()
        assert ended.status == 0 and "Traceback" not in ended.said, ended.said
        assert continued_after(ended.said) == ([saved] if saved else []), ended.said
        assert fault.loses or saved == done
        again = max(again, done - saved)
    same_end(case.run, base.undisturbed(kind.ranks))
    # A checkpoint may be written while the next steps are taken, and one may be damaged.
    assert 0 <= again <= 3 * EVERY
    return again, met.seconds


@kind("checkpoint damaged", 42, begun=True)
def checkpoint_damaged(case):
    path = newest(case.run / "checkpoints")
    case.damage(path, case.draw.choice(DAMAGES))
    yield Fault(0, rf"{path.name}: damaged checkpoint \(.*\n  set aside as .* is used")


@kind("all checkpoints damaged", 6, begun=True)
def all_checkpoints_damaged(case):
    with mended(case.run):
        for path in (case.run / "checkpoints").iterdir():
            case.damage(path, case.draw.choice(DAMAGES))
        yield Fault(2, r"damaged checkpoint \((.|\n)*no other checkpoint is left in")


@kind("data file damaged", 36, begun=True)
def data_file_damaged(case):
    how = case.draw.choice(DAMAGES)
    with mended(case.data):
        name = re.escape(case.damage(case.data, how, "*" if how == "vanished" else "*.npy"))
        says = {
            "truncated": rf"{name}: ",
            "flipped": rf"{name}: its content has changed \(SHA-256 differs\)",
            "vanished": rf"({name}: No such file|no prepared data here)",
        }[how]
        yield Fault(2, says)


@kind("stopped in a step in which a rank has no sample", 4, ranks=2)
def rank_without_samples(case):
    step = case.draw.choice([1, 2]) * STEPS_AN_EPOCH
    yield Fault(
        143,
        f"stopped by SIGTERM after step {step}, which is saved",
        disturbance=partial(at_step, step, signal.raise_signal, signal.SIGTERM),
        disturbed=case.draw.randrange(2),
        loses=False,
    )


def signalled(case, number):
    stage = case.draw.choice(["training", "training", "evaluation", "save"])
    moment = random_moment(case.draw, stage)
    yield Fault(128 + number, disturbance=partial(at_moment, moment, number), loses=False)


for _number in (signal.SIGTERM, signal.SIGINT):
    kind(_number.name, 18)(partial(signalled, number=_number))


def at_moment(moment, number):
    """A signal to this process."""
    return Place.here.at(moment, partial(os.kill, os.getpid(), number))


@kind("rank that hangs", 6, ranks=2)
def rank_that_hangs(case):
    rank = case.draw.randrange(2)
    yield Fault(
        3,
        f"the run hangs: rank {rank} makes no progress: ",
        # Seconds; far more than a step takes.
        ("run.hang_seconds=4",),
        partial(at_step, case.a_step(3), sleep_in_python),
        rank,
    )


@kind("exception in a rank", 4, ranks=2)
def exception_in_a_rank(case):
    error, lost = r"KeyError: 'a fault of this test'", r"connection to another rank is lost"
    yield Fault(
        1,
        rf"{error}(.|\n)*{lost}|{lost}(.|\n)*{error}",
        disturbance=partial(at_step, case.a_step(), {}.__getitem__, "a fault of this test"),
        disturbed=case.draw.randrange(2),
        traceback=True,
    )


@kind("second job in the same folder", 8)
def second_job(case):
    """While the first one stands still."""
    moment = random_moment(case.draw, case.draw.choice(["training", "evaluation"]))

    def start(first):
        stat = Path(f"/proc/{first.pid}/stat")
        assert wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
        try:
            return case.launch(said="second").end()
        finally:
            os.kill(first.pid, signal.SIGCONT)

    stopping = partial(at_moment, moment, signal.SIGSTOP)
    yield Fault(2, "is being written by another run", disturbance=stopping, meanwhile=start)


@kind("disk full", 20, begun=True)
def disk_full(case):
    """No checkpoint fits on it any more, and perhaps not even a line."""
    if not may_mount(case.base.folder):
        pytest.skip("this user may not mount a disk")
    size = sum(path.stat().st_size for path in newest(case.run / "checkpoints").iterdir())
    step = case.draw.choice([0, case.a_step(1), case.a_step(1)])
    free = case.draw.choice([0, case.draw.randrange(16384), case.draw.randrange(size)])
    disturbance = partial(disk_filling_up, step, case.runs, free if step else free % 16384)
    yield Fault(1, "No space left on device", disturbance=disturbance)


_CLONE_NEWNS, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x20000, 1 << 14, 1 << 18, 2


@contextmanager
def disk_filling_up(step, folder, free):
    """A folder lies on a disk that others fill at a step, all but so many bytes.

    What the folder then holds is kept. Only this process sees the disk. It fills between the
    checkpoints: one that was nearly written would make room again, as it replaces an older one.
    """
    write, writing, others = Checkpoints._write, Lock(), folder / "others"

    def write_alone(*arguments):
        with writing:
            write(*arguments)

    def fill():
        with writing, others.open("wb", buffering=0) as file:
            with suppress(OSError):
                while file.write(bytes(1 << 12)):
                    pass
            file.truncate(max(file.tell() - free, 0))

    def checked(result):
        if result != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    libc, aside = ctypes.CDLL(None, use_errno=True), folder.with_name("aside")
    checked(libc.unshare(_CLONE_NEWNS))
    checked(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))
    os.rename(folder, aside)
    folder.mkdir()
    checked(libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, b"size=20m"))
    Checkpoints._write = write_alone
    try:
        shutil.copytree(aside, folder, dirs_exist_ok=True)
        with at_step(step, fill):
            yield
    finally:
        others.unlink(missing_ok=True)
        shutil.rmtree(aside)
        shutil.copytree(folder, aside)
        checked(libc.umount2(str(folder).encode(), _MNT_DETACH))
        folder.rmdir()
        os.rename(aside, folder)


def may_mount(folder):
    """Whether this user may have a disk of its own."""
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", str(folder)]
    with suppress(FileNotFoundError):
        return subprocess.run(command, capture_output=True).returncode == 0
    return False


@kind("folder read-only", 16, begun=True)
def folder_read_only(case):
    folder = case.draw.choice([case.run, case.run / "checkpoints"])
    disturbance = partial(read_only_from, case.draw.randrange(19, STEPS - 9), folder)
    yield Fault(1, "Permission denied", disturbance=disturbance)


@contextmanager
def read_only_from(step, folder):
    """Nothing can be made in a folder, nor a file of it be changed, from a step on."""

    def chmod(mode):
        for path in folder.iterdir():
            if path.is_file():
                path.chmod(mode)

    def close():
        chmod(0o444)
        within.enter_context(read_only(folder))

    with ExitStack() as within, at_step(step, close):
        within.callback(chmod, 0o644)
        yield


@kind("number of a batch not finite", 16)
def number_not_finite(case):
    step, value = case.a_step(), case.draw.choice([float("nan"), float("inf"), -float("inf")])
    says = rf"at step {step}; this step changed no weights"
    yield Fault(1, says, disturbance=partial(one_poisoned, step, value))


@contextmanager
def one_poisoned(step, value):
    poisoned(Setting, [step], value=value)
    yield


@kind("out of memory", 8)
def out_of_memory(case):
    take = case.draw.choice([partial(torch.empty, 1 << 50), partial(np.empty, 1 << 50, np.uint8)])
    yield Fault(1, "memory", disturbance=partial(at_step, case.a_step(), take))


RESULTS = {}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The run that faults happen to; results are written if the soak was whole."""
    RESULTS.clear()
    yield Base(tmp_path_factory.mktemp("faults"))
    if RESULTS.keys() == KINDS.keys():
        write_results("faults_soak", "fault", RESULTS)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["SIGTERM", "checkpoint damaged"])
def test_one_fault(base, name):
    inject(KINDS[name], base, f"{name} 0")


@pytest.mark.soak
@pytest.mark.parametrize("name", KINDS)
def test_faults(base, name):
    times, outcomes, failures = KINDS[name].times, [], []
    for number in range(times):
        try:
            outcomes.append(inject(KINDS[name], base, f"{name} {number}"))
        except AssertionError as failure:
            failures.append(f"{name} {number}: {str(failure)[-3000:]}")
    assert not failures, "\n\n".join(failures)
    again, seconds = map(max, zip(*outcomes, strict=True))
    RESULTS[name] = {
        "injected": times,
        "ended as expected": len(outcomes),
        "steps done again at most": again,
        "longest seconds": round(seconds, 1),
    }
