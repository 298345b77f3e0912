"""Signals, processes that die, hang or fail, and a second job."""

import signal
import time
from functools import partial

from support.soak.cases import DEADLINE, STEPS_AN_EPOCH
from support.soak.disturbances import (
    at_step,
    end_process,
    raise_an_error,
    sleep_in_python,
)
from support.soak.faults.kind import Meeting, kind
from support.soak.killing import random_moment, reached

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
                assert time.monotonic() < begun + DEADLINE
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
