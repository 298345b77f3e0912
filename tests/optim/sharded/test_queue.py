"""Updates that are queued on a GPU; here Triton's interpreter runs the kernels."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton is not installed")

from stampede.optim import CowClip, CowClipTables, NonFiniteGradientError
from stampede.optim.nonfinite import LATE
from stampede.optim.rules import Adam
from stampede.optim.settings import UpdateSettings
from stampede.optim.sharded.backward_update import why_not_queued
from support.updated_tables import Tables, computed, of_rows
from support.waits import noted_waits

SIZES, DIM = (300, 41), 12
SETTINGS = [
    UpdateSettings(l2=1e-3, clip=CowClip(bound=1e-3)),
    UpdateSettings(l2=1e-3, clip=CowClip(bound=1e-3), rows="touched"),
    UpdateSettings(clip=CowClip(granularity="none"), l2=1e-2),
    UpdateSettings(clip=CowClip(columns=10), l2=1e-3, weight_decay=0.1),
    UpdateSettings(rule=Adam((0.5, 0.9), 1e-3, "torch"), weight_decay=0.3),
    UpdateSettings(clip=CowClip(granularity="row", threshold=0.1)),
]


def made(setting=SETTINGS[0]):
    tables = Tables(of_rows(*SIZES), [DIM] * 2, [0, 1], setting=setting, dim=DIM)
    tables.fill(torch.Generator().manual_seed(0))
    return tables


def one_step(tbe, number, lookups=1, bags=4, poison=None):
    """A step whose batch, gradient and learning rate depend on its number alone."""
    draw = torch.Generator().manual_seed(number)
    tbe.set_learning_rate(1e-3 * (1 + number % 5))
    outputs = []
    for _ in range(lookups):
        lengths = torch.randint(0, 3, (2 * bags,), generator=draw)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        ids = [
            (torch.rand(int(lengths[f * bags : (f + 1) * bags].sum()), generator=draw) * n).long()
            for f, n in enumerate(SIZES)
        ]
        outputs.append(tbe(torch.cat(ids), offsets))
    grad = torch.randn(outputs[0].shape, generator=draw)
    if poison is not None:
        grad[:] = poison
    torch.autograd.backward(outputs, [grad] * lookups)


def state_of(tbe):
    weights = [w.clone() for w in tbe.split_embedding_weights()]
    states = [s.clone() for _, states in tbe.shard_states() for s in states.values()]
    return [*weights, *states, tbe.step_count.clone(), tbe.row_counts.clone()]


def trained(way, setting, steps, at_step=None, lookups=lambda _: 1):
    with computed(way):
        tables = made(setting)
        for number in range(steps):
            one_step(tables.tbe, number, lookups(number))
            if at_step is not None:
                at_step(number, tables.tbe)
        assert (tables.owner.flag is not None) == (way == "queued")
        return state_of(tables.tbe)


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def assert_same_bits(found, expected):
    assert len(found) == len(expected) > 2
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("setting", SETTINGS)
def test_queued_steps_are_those_of_the_cpu(setting):
    assert_close(trained("queued", setting, 8), trained("kernels", setting, 8))


@pytest.mark.parametrize("setting", SETTINGS[:2])
def test_a_step_with_several_lookups_is_not_queued_but_counts(setting):
    def lookups(step):
        return 2 if step in (3, 5, 6) else 1

    found = trained("queued", setting, 9, lookups=lookups)
    assert_close(found, trained("kernels", setting, 9, lookups=lookups))


def test_rows_wait_but_not_longer_than_the_window():
    gaps = []

    def look(step, tbe):
        gaps.append(int(step + 1 - tbe.backends[0].waiting.last.min()))

    trained("queued", SETTINGS[0], 8, at_step=look)
    assert max(gaps) == 3 - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting, poison", [(SETTINGS[0], float("nan")), (SETTINGS[1], float("inf"))]
)
def test_a_step_that_is_not_finite_is_named_later_and_undone(setting, poison):
    """Neither it nor those queued after it are taken; the next ones are as if nothing had been."""
    with computed("queued"):
        tbe = made(setting).tbe
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
        tables = made()
        tbe = tables.tbe
        one_step(tbe, 0)
        tables.owner.flag.mark(torch.tensor(float("inf")))
        with pytest.raises(NonFiniteGradientError, match="loss"):
            one_step(tbe, 1, lookups=2)
        one_step(tbe, 1)
        assert_same_bits(state_of(tbe), trained("queued", SETTINGS[0], 2))


@pytest.mark.parametrize("read", [lambda tbe: tbe.flush(), lambda tbe: tbe.weights_tensor()])
def test_whoever_reads_the_tables_learns_of_it_at_once(read):
    with computed("queued"):
        tbe = made().tbe
        one_step(tbe, 0)
        one_step(tbe, 1, poison=float("nan"))
        with pytest.raises(NonFiniteGradientError, match="step 2"):
            read(tbe)
        assert_same_bits(state_of(tbe), trained("queued", SETTINGS[0], 1))


def test_a_loss_that_is_not_finite_forbids_the_step():
    with computed("queued"):
        tables = made()
        tbe = tables.tbe
        one_step(tbe, 0)
        tables.owner.flag.mark(torch.tensor(float("nan")))
        one_step(tbe, 1)
        with pytest.raises(NonFiniteGradientError, match="step 2"):
            tables.owner.check_queued(up_to_now=True)
        assert_same_bits(state_of(tbe), trained("queued", SETTINGS[0], 1))


def test_what_the_kernels_cannot_do_is_not_queued():
    # Rows that are not in the batch may be clipped, too.
    setting, reason = UpdateSettings(l2=1.0, clip=CowClip(ratio=0.5)), "cannot be replayed"
    with computed("queued"):
        tables = made(setting)
        for number in range(3):
            one_step(tables.tbe, number)
        assert tables.owner.flag is None
        said = why_not_queued([tables.tbe], has_helen=False)
        assert said.startswith("tables t0, t1: ") and reason in said
        assert "Helen" in why_not_queued([tables.tbe], has_helen=True)
        found = state_of(tables.tbe)
    assert_close(found, trained("kernels", setting, 3))


@pytest.mark.parametrize("setting", SETTINGS[:2])
@pytest.mark.parametrize("way", ["queued", "torch"])
def test_only_a_step_that_is_not_queued_waits_for_the_device(way, setting):
    with computed(way):
        tbe = made(setting).tbe
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
        tbe = made().tbe
        # Rows are behind, which are found by their ids.
        one_step(tbe, 0)
        mode = tbe.bounds_check_mode_int
        ids = torch.tensor([5, 10**6, 7, 40])
        with Checks() as checks:
            found = tbe(ids, torch.arange(5))
        first, second = tbe.split_embedding_weights()
    assert checks.count == 1 and tbe.bounds_check_mode_int == mode
    assert torch.equal(found, torch.stack([first[[5, 0]], second[[7, 40]]], 1).flatten(1))
