"""Kinds of faults: how each is injected, what the user then sees, and how it is mended.

A kind is a context: it injects the fault into a `Case`, gives how the launcher is to meet it, and
mends it at its end.
"""

import os
import re
import signal
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

from stampede.engine.config import all_keys, config_type
from support.soak.cases import DEADLINE, STEPS, STEPS_AN_EPOCH
from support.soak.damages import DAMAGES, age, damage, mended
from support.soak.disturbances import (
    at_step,
    clock_going_backwards,
    disk_filling_up,
    end_process,
    lines_to_a_full_device,
    poisoned,
    raise_an_error,
    read_only_from,
    short_files,
    sleep_in_python,
    take_memory_of_numpy,
    take_memory_of_torch,
)
from support.soak.killing import random_moment, reached

KINDS = {}

# Seconds without progress that are a hang; far more than a step takes.
_PATIENCE = 4


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


def _kind(name, times, status, **more):
    def register(inject):
        KINDS[name] = Kind(contextmanager(inject), times, status, **more)
        return inject

    return register


@_kind("disk full", 14, 1, begun=True, needs_disk=True)
def disk_full(case):
    """No checkpoint fits on it any more, and perhaps not even a line."""
    size = sum(path.stat().st_size for path in case.checkpoint.iterdir())
    free = case.draw.choice([case.draw.randrange(16384), case.draw.randrange(size)])
    yield Meeting(
        "No space left on device",
        disturbance=partial(disk_filling_up, case.a_step(1), case.runs, free),
    )


@_kind("device of the log full", 8, 1)
def device_of_the_log_full(case):
    yield Meeting(
        r"results cannot be written \(No space left on device\); make room",
        disturbance=partial(lines_to_a_full_device, case.a_step(), case.run),
    )


@_kind("file size limited", 10, 1, begun=True)
def file_size_limited(case):
    largest = max(path.stat().st_size for path in case.checkpoint.iterdir())
    # What this process says goes into files as well.
    most = case.draw.randrange(30_000, largest)
    yield Meeting("File too large", disturbance=partial(short_files, case.a_step(1), most))


@_kind("folder read-only from the start", 6, 2, begun=True)
def read_only_from_the_start(case):
    folder = case.draw.choice([case.run, case.run / "checkpoints"])
    yield Meeting("Permission denied", disturbance=partial(read_only_from, 0, folder))


@_kind("folder read-only from a step on", 10, 1, begun=True)
def read_only_from_a_step_on(case):
    folder = case.draw.choice([case.run, case.run / "checkpoints"])
    disturbance = partial(read_only_from, case.draw.randrange(19, STEPS - 9), folder)
    yield Meeting("Permission denied", disturbance=disturbance)


@_kind("data file vanished", 14, 2, begun=True)
def data_file_vanished(case):
    with mended(case.data):
        path = case.a_file(case.data)
        path.unlink()
        yield Meeting(rf"({re.escape(path.name)}: is absent|no prepared data here)")


@_kind("data shard changed", 14, 2, begun=True)
def data_shard_changed(case):
    with mended(case.data):
        path = case.a_file(case.data, "*.npy")
        damage(path, "flipped", case.draw)
        manifest = case.data / "manifest.json"
        # As long after the preparation as a day.
        os.utime(path, (0, manifest.stat().st_mtime + case.draw.uniform(0.01, 86400)))
        yield Meeting(rf"{re.escape(path.name)}: its content has changed \(SHA-256 differs\)")


@_kind("data shard truncated", 6, 2, begun=True)
def data_shard_truncated(case):
    with mended(case.data):
        path = case.a_file(case.data, "*.npy")
        damage(path, "truncated", case.draw)
        yield Meeting(rf"{re.escape(path.name)}: ")


@_kind("data file shortened while it is read", 8, 2)
def data_file_shortened(case):
    with mended(case.data):
        path = case.a_file(case.data, "train-*.npy")
        # The last batch was read before the last step but one.
        disturbance = partial(
            at_step,
            case.draw.randrange(1, STEPS - 3),
            os.truncate,
            path,
            case.draw.randrange(path.stat().st_size),
        )
        yield Meeting(
            rf"{re.escape(path.name)}: was shortened to [\d,]+ bytes while it was being read",
            ("data.residence=disk",),
            disturbance,
        )


@_kind("checkpoint truncated", 14, 0, begun=True)
def checkpoint_truncated(case):
    yield from _newest_checkpoint_damaged(case, "truncated")


@_kind("bit of a checkpoint flipped", 20, 0, begun=True)
def checkpoint_flipped(case):
    yield from _newest_checkpoint_damaged(case, "flipped")


@_kind("file of a checkpoint vanished", 8, 0, begun=True)
def checkpoint_vanished(case):
    yield from _newest_checkpoint_damaged(case, "vanished")


def _newest_checkpoint_damaged(case, how):
    path = case.checkpoint
    damage(case.a_file(path), how, case.draw)
    yield Meeting(rf"{path.name}: damaged checkpoint \(.*\n  set aside as .* is used")


@_kind("all checkpoints damaged", 6, 2, begun=True)
def all_checkpoints_damaged(case):
    with mended(case.run):
        for path in (case.run / "checkpoints").iterdir():
            damage(case.a_file(path), case.draw.choice(DAMAGES), case.draw)
        yield Meeting(r"damaged checkpoint \((.|\n)*no other checkpoint is left in")


@_kind("number of a batch not finite", 14, 1)
def number_not_finite(case):
    step, value = case.a_step(), case.draw.choice([float("nan"), float("inf"), -float("inf")])
    yield Meeting(
        rf"at step {step}; the weights are as before",
        disturbance=partial(poisoned, step, value),
        rank=case.draw.randrange(case.ranks),
    )


@_kind("stopped in a step in which a rank has no sample", 4, 143, ranks=2, loses=False)
def rank_without_samples(case):
    step = case.draw.choice([1, 2]) * STEPS_AN_EPOCH
    yield Meeting(
        f"stopped by SIGTERM after step {step}, which is saved",
        disturbance=partial(at_step, step, signal.raise_signal, signal.SIGTERM),
        rank=case.draw.randrange(case.ranks),
    )


@_kind("SIGTERM", 14, 143, loses=False)
def sigterm(case):
    yield _signalled(case, signal.SIGTERM)


@_kind("SIGINT", 14, 130, loses=False)
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
                assert time.monotonic() < begun + DEADLINE
                time.sleep(0.001)
            time.sleep(moment.delay / 5)
            worker.signal(number)
        else:
            assert reached(worker, case.run, moment)
            worker.signal(number)
            worker.go_on()

    return Meeting("", meanwhile=send)


@_kind("kill -9", 8, 137)
def killed(case):
    yield Meeting("", disturbance=partial(at_step, case.a_step(), end_process))


@_kind("process that hangs", 4, 3)
def hang(case):
    yield Meeting(
        "the run hangs: rank 0 does not go on: .*in sleep_in_python",
        (f"run.hang_seconds={_PATIENCE}",),
        partial(at_step, case.a_step(3), sleep_in_python),
    )


@_kind("rank that hangs", 2, 3, ranks=2)
def rank_that_hangs(case):
    yield Meeting(
        "the run hangs: rank 1 does not go on: .*in sleep_in_python",
        (f"run.hang_seconds={_PATIENCE}",),
        partial(at_step, case.a_step(3), sleep_in_python),
        rank=1,
    )


@_kind("exception in a rank", 4, 1, ranks=2, traceback=True)
def exception_in_a_rank(case):
    yield Meeting(
        r"KeyError: 'a fault of this test'(.|\n)*connection to another rank is lost|"
        r"connection to another rank is lost(.|\n)*KeyError: 'a fault of this test'",
        disturbance=partial(at_step, case.a_step(), raise_an_error),
        rank=case.draw.randrange(2),
    )


@_kind("clock going backwards", 8, 0, begun=True)
def clock_backwards(case):
    age(case.run, case.draw.uniform(0, 1e6))
    yield Meeting(
        f"continuing after step 16 from {re.escape(str(case.checkpoint))}",
        ("checkpoint.every_minutes=0.001",),
        partial(clock_going_backwards, case.draw.random()),
    )


@_kind("second job in the same folder", 8, 2)
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


@_kind("out of memory", 8, 1)
def out_of_memory(case):
    take = case.draw.choice([take_memory_of_torch, take_memory_of_numpy])
    yield Meeting("memory", disturbance=partial(at_step, case.a_step(), take))


@_kind("key misspelled", 12, 2, begun=True)
def key_misspelled(case):
    known = [key.path for key in all_keys(config_type())]
    key = case.draw.choice(known)
    while key in known:
        key = list(case.draw.choice(known))
        place = case.draw.randrange(len(key))
        key[place : place + case.draw.randrange(2)] = case.draw.choice("abcdefghijklmnopqrstuvwxyz")
        key = "".join(key)
    yield Meeting(re.escape(key.split(".")[0]), (f"{key}=1",))


@_kind("key changed that may not be", 8, 2, begun=True)
def key_changed(case):
    changed = case.draw.choice([
        "model.dim=7", "model.hidden=[8]", "model.name=lr", "train.batch_size=63", "run.seed=9",
        "optim.embedding.l2=0.5", "optim.embedding.optimizer=sgd", "optim.scaling.rule=linear",
        "optim.dense.betas=[0.8,0.9]", "evaluate.select_on=validation",
    ])  # fmt: skip
    yield Meeting(r"cannot be continued|select_on", (changed,))
