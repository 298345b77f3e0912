"""Numbers that are not finite, a lack of memory."""

from functools import partial

from support.soak.disturbances import (
    at_step,
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


@kind("out of memory", 8, 1)
def out_of_memory(case):
    take = case.draw.choice([take_memory_of_torch, take_memory_of_numpy])
    yield Meeting("memory", disturbance=partial(at_step, case.a_step(), take))
