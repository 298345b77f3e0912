"""Numbers that are not finite, a clock that goes backwards, a lack of memory."""

import re
from functools import partial

from support.soak.damages import age
from support.soak.disturbances import (
    at_step,
    clock_going_backwards,
    poisoned,
    take_memory_of_numpy,
    take_memory_of_torch,
)
from support.soak.faults.kind import Meeting, kind


@kind("number of a batch not finite", 14, 1)
def number_not_finite(case):
    step, value = case.a_step(), case.draw.choice([float("nan"), float("inf"), -float("inf")])
    yield Meeting(
        rf"at step {step}; the weights are as before",
        disturbance=partial(poisoned, step, value),
        rank=case.draw.randrange(case.ranks),
    )


@kind("clock going backwards", 8, 0, begun=True)
def clock_backwards(case):
    age(case.run, case.draw.uniform(0, 1e6))
    yield Meeting(
        f"continuing after step 16 from {re.escape(str(case.checkpoint))}",
        ("checkpoint.every_minutes=0.001",),
        partial(clock_going_backwards, case.draw.random()),
    )


@kind("out of memory", 8, 1)
def out_of_memory(case):
    take = case.draw.choice([take_memory_of_torch, take_memory_of_numpy])
    yield Meeting("memory", disturbance=partial(at_step, case.a_step(), take))
