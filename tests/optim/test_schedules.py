"""Learning-rate schedules against torch's own schedulers, and what they promise."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from stampede.optim import Schedule, learning_rate

LR = 0.3


def ours(schedule, steps, steps_per_epoch=1.0, lr=LR):
    return [learning_rate(schedule, lr, step, steps_per_epoch, steps) for step in range(steps)]


def theirs(make_scheduler, steps):
    """Rates of torch's scheduler, which is made from an optimizer."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    scheduler, rates = make_scheduler(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def linear(steps):
    return lambda optimizer: lr_scheduler.LinearLR(optimizer, 1e-8 / LR, 1.0, steps)


# The schedule, and torch's for a training of 40 steps.
SAME = {
    "constant": (Schedule(unit="steps"), lambda o: lr_scheduler.ConstantLR(o, 1.0)),
    "warm-up": (Schedule(warmup=7, unit="steps"), linear(7)),
    "polynomial": (
        Schedule(decay="polynomial", unit="steps", length=25, power=2.5),
        lambda o: lr_scheduler.PolynomialLR(o, 25, power=2.5),
    ),
    "cosine": (
        Schedule(decay="cosine", unit="steps", final=0.2),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 40, eta_min=0.2 * LR),
    ),
    "step": (
        Schedule(decay="step", unit="steps", every=6, factor=0.5),
        lambda o: lr_scheduler.StepLR(o, 6, 0.5),
    ),
    "warm-up, cosine": (
        Schedule(warmup=5, decay="cosine", unit="steps"),
        lambda o: lr_scheduler.SequentialLR(
            o, [linear(5)(o), lr_scheduler.CosineAnnealingLR(o, 35)], [5]
        ),
    ),
}


@pytest.mark.parametrize("schedule, scheduler", SAME.values(), ids=SAME)
def test_follows_torch(schedule, scheduler):
    assert ours(schedule, 40) == pytest.approx(theirs(scheduler, 40), rel=1e-9)


@pytest.mark.parametrize(
    "in_steps, in_epochs",
    [
        (Schedule(16, unit="steps"), Schedule(2)),
        (Schedule(4, unit="steps"), Schedule(0.5)),
        (
            Schedule(8, "polynomial", "steps", length=24, power=3, final=0.1),
            Schedule(1, "polynomial", length=3, power=3, final=0.1),
        ),
        (Schedule(8, "cosine", "steps"), Schedule(1, "cosine")),
        (Schedule(4, "step", "steps", every=4), Schedule(0.5, "step", every=0.5)),
    ],
)
def test_epochs_are_so_many_steps(in_steps, in_epochs):
    assert ours(in_steps, 40) == ours(in_epochs, 40, steps_per_epoch=8)


def test_a_batch_that_is_not_whole_counts_for_drops_but_not_for_the_warmup():
    # 7.8 batches: 8 steps in an epoch, of which 7 are whole batches.
    rates = ours(Schedule(1), 24, steps_per_epoch=7.8)
    assert rates.index(LR) == 7
    rates = ours(Schedule(decay="step", factor=0.5), 24, steps_per_epoch=7.8)
    assert rates == [LR] * 8 + [LR / 2] * 8 + [LR / 4] * 8


def test_drops_come_on_time_where_products_are_not_exact():
    for hundredths in range(1, 100):
        schedule = Schedule(decay="step", every=hundredths / 100, factor=0)
        assert ours(schedule, 101, steps_per_epoch=100).index(0) == hundredths


def test_a_warmup_as_long_as_the_training_leaves_no_decay():
    assert learning_rate(Schedule(6, "cosine", final=0.5), LR, 60, 10, 60) == LR / 2
    assert ours(Schedule(6, "cosine"), 60, 10) == ours(Schedule(6), 60, 10)


FRACTIONS, LENGTHS = st.floats(0, 1), st.none() | st.floats(0.1, 50)
# What each decay uses.
USED = {
    "constant": {},
    "polynomial": {"length": LENGTHS, "final": FRACTIONS, "power": st.floats(0.1, 5)},
    "cosine": {"length": LENGTHS, "final": FRACTIONS},
    "step": {"every": st.floats(0.1, 20), "factor": FRACTIONS},
}
WARMUPS, UNITS = st.floats(0, 30), st.sampled_from(["epochs", "steps"])
SCHEDULES = [
    st.builds(Schedule, warmup=WARMUPS, decay=st.just(decay), unit=UNITS, **used)
    for decay, used in USED.items()
]


@settings(max_examples=100, deadline=None)
@given(
    schedule=st.one_of(SCHEDULES),
    lr=st.just(0.0) | st.floats(1e-10, 10),
    steps_per_epoch=st.floats(0.1, 20),
    total=st.integers(1, 300),
)
def test_rises_then_falls_and_stays_within_0_and_the_full_rate(
    schedule, lr, steps_per_epoch, total
):
    rates = ours(schedule, total, steps_per_epoch, lr)
    assert all(0 <= rate <= lr * (1 + 1e-12) for rate in rates)
    top = rates.index(max(rates))
    slack = lr * 1e-12
    assert all(one <= other + slack for one, other in pairwise(rates[: top + 1]))
    assert all(one >= other - slack for one, other in pairwise(rates[top:]))


@pytest.mark.parametrize(
    "values, words",
    [
        ({"decay": "linear"}, "decay is 'linear'; write one of constant, polynomial, cosine, step"),
        ({"unit": "batches"}, "unit is 'batches'; write one of epochs, steps"),
        ({"warmup": -1}, "warmup is -1; write a number of at least 0"),
        ({"warmup": math.nan}, "warmup is nan"),
        ({"decay": "cosine", "length": 0}, "length is 0; write a number above 0, or leave"),
        ({"decay": "cosine", "final": 1.5}, "final is 1.5; write a number from 0 to 1"),
        ({"decay": "step", "every": 0}, "every is 0; write a number above 0"),
        ({"length": 3}, "length is 3, which decay 'constant' does not use; leave it out, or "
                        "choose decay 'polynomial' or 'cosine'"),
    ],
)  # fmt: skip
def test_bad_values_get_a_sentence(values, words):
    with pytest.raises(ValueError) as failure:
        Schedule(**values)
    assert words in str(failure.value)
