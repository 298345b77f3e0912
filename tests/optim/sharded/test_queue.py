"""Updates that are queued on a GPU; here Triton's interpreter runs the kernels."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton is not installed")

from stampede.optim import CowClip, CowClipTables, NonFiniteGradientError
from stampede.optim.nonfinite import LATE
from stampede.optim.sharded.backward_update import why_not_queued
from stampede.optim.update_settings import UpdateSettings
from support.updated_tables import (
    CAN_WAIT,
    assert_same_bits,
    computed,
    one_step,
    state_of,
    trained,
    two_tables,
)
from support.waits import noted_waits

SETTINGS = [*CAN_WAIT, replace(CAN_WAIT[0], rows="touched")]
BOTH_KINDS = SETTINGS[0], SETTINGS[-1]


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting, twice", [*product(SETTINGS, [()]), *product(BOTH_KINDS, [(3, 5, 6)])]
)
def test_queued_steps_are_those_of_the_cpu(setting, twice):
    """Also among steps with two lookups, which are not queued."""
    found, expected = (
        trained(way, setting, 9, lookups=lambda step: 2 if step in twice else 1)
        for way in ("queued", "kernels")
    )
    assert_close(found, expected)


@pytest.mark.wide
@pytest.mark.parametrize(
    "setting, poison", zip(BOTH_KINDS, (float("nan"), float("inf")), strict=True)
)
def test_a_step_that_is_not_finite_is_named_later_and_undone(setting, poison):
    """Neither it nor those queued after it are taken; the next ones are as if nothing had been."""
    with computed("queued"):
        tbe = two_tables(setting).tbe
        for number in range(4):
            one_step(tbe, number)
        one_step(tbe, 4, poison=poison)
        for number in range(5, 4 + LATE):
            one_step(tbe, number)
        with pytest.raises(NonFiniteGradientError, match="step 5") as raised:
            one_step(tbe, 4 + LATE)
        assert raised.value.ago == LATE
        assert_same_bits(state_of(tbe), trained("queued", setting, 4))
        for number in range(4, 6):
            one_step(tbe, number)
        assert_same_bits(state_of(tbe), trained("queued", setting, 6))


def test_a_mark_forbids_also_a_step_that_is_not_queued():
    with computed("queued"):
        tables = two_tables()
        tbe = tables.tbe
        one_step(tbe, 0)
        tables.owner.flag.mark(torch.tensor(float("inf")))
        with pytest.raises(NonFiniteGradientError, match="loss"):
            one_step(tbe, 1, lookups=2)
        one_step(tbe, 1)
        assert_same_bits(state_of(tbe), trained("queued", SETTINGS[0], 2))


@pytest.mark.parametrize("read", [lambda tbe: tbe.flush(), lambda tbe: tbe.weights_tensor()])
@pytest.mark.parametrize("bad", ["gradient", "loss"])
def test_whoever_reads_the_tables_learns_of_it_at_once(bad, read):
    with computed("queued"):
        tables = two_tables()
        one_step(tables.tbe, 0)
        if bad == "loss":
            tables.owner.flag.mark(torch.tensor(float("nan")))
        one_step(tables.tbe, 1, poison=float("nan") if bad == "gradient" else None)
        with pytest.raises(NonFiniteGradientError, match="step 2"):
            read(tables.tbe)
        assert_same_bits(state_of(tables.tbe), trained("queued", SETTINGS[0], 1))


def test_what_the_kernels_cannot_do_is_not_queued():
    # Rows that are not in the batch may be clipped, too.
    setting, reason = UpdateSettings(l2=1.0, clip=CowClip(ratio=0.5)), "cannot be replayed"
    with computed("queued"):
        tables = two_tables(setting)
        for number in range(3):
            one_step(tables.tbe, number)
        assert tables.owner.flag is None
        said = why_not_queued([tables.tbe])
        assert said.startswith("tables t0, t1: ") and reason in said
        found = state_of(tables.tbe)
    assert_close(found, trained("kernels", setting, 3))


@pytest.mark.parametrize("setting", BOTH_KINDS)
@pytest.mark.parametrize("way", ["queued", "torch"])
def test_only_a_step_that_is_not_queued_waits_for_the_device(way, setting):
    with computed(way):
        tbe = two_tables(setting).tbe
        one_step(tbe, 0)
        indices, offsets = torch.tensor([5, 7, 5, 40]), torch.tensor([0, 1, 2, 3, 4])
        with noted_waits([tbe.step_count, tbe.learning_rate_tensor]) as waits:
            output = tbe(indices, offsets)
            output.backward(torch.ones_like(output))
    assert bool(waits) == (way == "torch")


@pytest.mark.parametrize("way", ["queued", "waiting", "torch"])
def test_ids_are_checked_once_and_corrected(way, monkeypatch):
    class Checks(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += "bounds_check_indices" in str(func)
            return func(*args, **(kwargs or {}))

    # As on a GPU.
    monkeypatch.setattr(CowClipTables, "_is_pooled_here", lambda _: False)
    with computed(way):
        tbe = two_tables().tbe
        # Rows are behind, which are found by their ids.
        one_step(tbe, 0)
        mode = tbe.bounds_check_mode_int
        ids = torch.tensor([5, 10**6, 7, 40])
        with Checks() as checks:
            found = tbe(ids, torch.arange(5))
        first, second = tbe.split_embedding_weights()
    assert checks.count == 1 and tbe.bounds_check_mode_int == mode
    assert torch.equal(found, torch.stack([first[[5, 0]], second[[7, 40]]], 1).flatten(1))
