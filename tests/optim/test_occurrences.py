"""Counts of ids behind a table's gradient, however many lookups and backward passes it sums."""

import copy
import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from stampede.optim import CowClip, CowClipAdam, CowClipSGD
from stampede.optim.row_gradients import ids_behind

ROWS, DIM = 6, 3


class Lookups:
    """One table, looked up by modules of every kind."""

    def __init__(self, padding_idx=None):
        self.embedding = nn.Embedding(ROWS, DIM, sparse=True, padding_idx=padding_idx)
        self.weight = self.embedding.weight
        self.bags = {}
        for mode in ("sum", "mean"):
            for last in (False, True):
                bag = nn.EmbeddingBag(
                    ROWS,
                    DIM,
                    sparse=True,
                    mode=mode,
                    padding_idx=padding_idx,
                    include_last_offset=last,
                )
                bag.weight = self.weight
                self.bags[mode, last] = bag

    def look_up(self, kind, ids):
        ids = torch.tensor(ids, dtype=torch.int64)
        if kind == "embedding":
            return self.embedding(ids)
        if kind == "2d":
            return self.bags["sum", False](ids[:, None])
        if kind == "weighted":
            factors = torch.rand(len(ids), requires_grad=True)
            return self.bags["sum", True](ids, torch.tensor([0, len(ids)]), factors)
        offsets = [0, 1, len(ids)] if kind[1] else [0, 1]
        return self.bags[kind](ids, torch.tensor(offsets))


KINDS = ["embedding", "2d", "weighted", ("sum", False), ("sum", True), ("mean", True)]
lookup = st.tuples(
    st.sampled_from(KINDS), st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=9)
)
passes = st.lists(st.lists(lookup, min_size=1, max_size=3), min_size=1, max_size=3)


def backward(results):
    sum(result.square().sum() for result in results).backward()


@settings(max_examples=60, deadline=None)
@given(passes=passes, padding_idx=st.sampled_from([None, 0, 5]))
def test_every_occurrence_counts(passes, padding_idx):
    table = Lookups(padding_idx)
    CowClipSGD([table.weight])
    expected = []
    for lookups in passes:
        backward(table.look_up(kind, ids) for kind, ids in lookups)
        expected += [i for _, ids in lookups for i in ids if i != padding_idx]
    assert sorted(ids_behind(table.weight).tolist()) == sorted(expected)


@pytest.mark.parametrize("passes", [[[3, 5], [3, 5]], [[3, 3, 5, 5]], [[3], [3], [5], [5]]])
@pytest.mark.parametrize("one_backward", [True, False])
def test_the_step_is_that_of_one_lookup(passes, one_backward):
    """Clipped rows: their step is proportional to the count."""
    table = nn.Embedding(ROWS, DIM, sparse=True)
    with torch.no_grad():
        table.weight.copy_(torch.arange(1.0, ROWS * DIM + 1).view(ROWS, DIM))
    before = table.weight.detach().clone()
    optimizer = CowClipSGD(table.parameters(), lr=1.0, clip=CowClip(ratio=1e-3))
    losses = [table(torch.tensor(ids)).square().sum() for ids in passes]
    for loss in [sum(losses)] if one_backward else losses:
        loss.backward()
    optimizer.step()
    moved = (before - table.weight.detach()).norm(dim=1)
    expected = torch.zeros(ROWS)
    expected[[3, 5]] = 2 * 1e-3 * before[[3, 5]].norm(dim=1)
    torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("whose", ["optimizer", "module"])
def test_zero_grad_forgets(set_to_none, whose):
    table = Lookups()
    optimizer = CowClipSGD([table.weight])
    for _ in range(2):
        backward([table.look_up("embedding", [1, 2]), table.look_up("embedding", [1, 2])])
        assert sorted(ids_behind(table.weight).tolist()) == [1, 1, 2, 2]
        {"optimizer": optimizer, "module": table.embedding}[whose].zero_grad(set_to_none)


def test_a_gradient_put_in_place_by_hand_counts_for_itself():
    table = Lookups()
    CowClipSGD([table.weight])
    backward([table.look_up("embedding", [1, 2]), table.look_up("embedding", [1, 2])])
    table.weight.grad = torch.sparse_coo_tensor([[4, 4]], torch.ones(2, DIM), (ROWS, DIM))
    assert ids_behind(table.weight).tolist() == [4, 4]


def test_what_is_added_to_lost_counts_is_lost():
    table = Lookups()
    optimizer = CowClipSGD([table.weight])
    backward([table.look_up("embedding", [1, 2, 2])])
    table.weight.grad = table.weight.grad.coalesce()
    backward([table.look_up("embedding", [1, 2, 2])])
    assert ids_behind(table.weight) is None
    with pytest.raises(ValueError, match="coalesced"):
        optimizer.step()


def test_a_backward_that_fails_leaves_no_counts():
    table = Lookups()
    CowClipSGD([table.weight])
    first, second = (table.look_up("embedding", [1, 2]) for _ in range(2))
    # The engine comes to the second lookup first, and no further.
    first.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward([first, second])
    backward([table.look_up("embedding", [4])])
    assert ids_behind(table.weight).tolist() == [4]


def test_evaluation_between_backward_and_step_does_not_count():
    table = Lookups()
    CowClipSGD([table.weight])
    backward([table.look_up("embedding", [1, 2]), table.look_up("embedding", [1])])
    table.look_up("embedding", [3, 3])
    with torch.no_grad():
        table.look_up("embedding", [3, 3])
    assert sorted(ids_behind(table.weight).tolist()) == [1, 1, 2]


def test_passes_of_functional_lookups_add_up():
    weight = nn.Parameter(torch.randn(ROWS, DIM))
    CowClipSGD([weight])
    for _ in range(2):
        functional.embedding(torch.tensor([1, 2]), weight, sparse=True).square().sum().backward()
    assert sorted(ids_behind(weight).tolist()) == [1, 1, 2, 2]


def test_lookups_in_a_checkpointed_part_count_once():
    table = Lookups()
    CowClipSGD([table.weight])
    for reentrant in (False, True):
        table.weight.grad = None
        part = torch.utils.checkpoint.checkpoint(
            lambda start: table.look_up("embedding", [1, 2]) + start,
            torch.zeros((), requires_grad=True),
            use_reentrant=reentrant,
        )
        backward([part, table.look_up("embedding", [1, 2])])
        assert sorted(ids_behind(table.weight).tolist()) == [1, 1, 2, 2]


@pytest.mark.parametrize("order", [("model", "optimizer"), ("optimizer", "model")])
def test_copies_count_too(order):
    made = {"model": nn.Embedding(ROWS, DIM, sparse=True)}
    made["optimizer"] = CowClipAdam(made["model"].parameters())
    copied = copy.deepcopy({name: made[name] for name in order})
    model = copied["model"]
    backward([model(torch.tensor([1, 2])), model(torch.tensor([1, 2]))])
    assert sorted(ids_behind(model.weight).tolist()) == [1, 1, 2, 2]
    copied["optimizer"].step()
    assert model.weight in copied["optimizer"].state


def test_nothing_is_kept_alive():
    table = nn.Embedding(ROWS, DIM, sparse=True)
    optimizer = CowClipSGD(table.parameters())
    backward([table(torch.tensor([1, 2])), table(torch.tensor([1, 2]))])
    optimizer.step()
    alive = weakref.ref(table)
    del table, optimizer
    gc.collect()
    assert alive() is None
