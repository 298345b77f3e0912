"""Counts of ids behind a table's gradient: told, noted, given or refused; modules of tables."""

import copy
import gc
import weakref
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stampede.optim import CowClipAdam, CowClipSGD
from stampede.optim.row_gradients import ids_behind
from support.one_table import CLASSES, ids_of_step, table
from support.ranks import process_group

ROWS, DIM = 6, 3


class Lookups:
    """One table, looked up by modules of every kind."""

    def __init__(self, padding_idx=None):
        self.embedding = nn.Embedding(ROWS, DIM, sparse=True, padding_idx=padding_idx)
        self.weight = self.embedding.weight
        self.bags = {}
        for mode, last in product(("sum", "mean"), (False, True)):
            options = {"sparse": True, "mode": mode, "include_last_offset": last}
            bag = nn.EmbeddingBag(ROWS, DIM, padding_idx=padding_idx, **options)
            bag.weight = self.weight
            self.bags[mode, last] = bag
        CowClipSGD([self.weight])

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


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(passes=passes, padding_idx=st.sampled_from([None, 0, 5]))
def test_every_occurrence_counts(passes, padding_idx):
    table = Lookups(padding_idx)
    expected = []
    for lookups in passes:
        backward(table.look_up(kind, ids) for kind, ids in lookups)
        expected += [i for _, ids in lookups for i in ids if i != padding_idx]
    assert sorted(ids_behind(table.weight).tolist()) == sorted(expected)


def test_a_gradient_put_in_place_by_hand_counts_for_itself():
    table = Lookups()
    backward([table.look_up("embedding", [1, 2])])
    table.weight.grad = torch.sparse_coo_tensor([[4, 4]], torch.ones(2, DIM), (ROWS, DIM))
    assert ids_behind(table.weight).tolist() == [4, 4]


@pytest.mark.parametrize("change", [
    lambda grad: grad / 2,
    lambda grad: grad.clone(),
    lambda grad: grad.mul_(0.5),
    lambda grad: grad.coalesce(),
])  # fmt: skip
@pytest.mark.parametrize("several", ["lookups", "passes"])
def test_another_gradient_after_several_lookups_has_lost_its_counts(several, change):
    table = Lookups()
    outputs = [table.look_up("embedding", [1, 2, 1]) for _ in range(2)]
    for each in [outputs] if several == "lookups" else [[one] for one in outputs]:
        backward(each)
    assert sorted(ids_behind(table.weight).tolist()) == [1, 1, 1, 1, 2, 2]
    table.weight.grad.div_(2)
    assert len(ids_behind(table.weight)) == 6
    table.weight.grad = change(table.weight.grad)
    assert ids_behind(table.weight) is None


@pytest.mark.parametrize("lookups", [1, 2])
def test_a_gradient_that_autograd_returned(lookups):
    table = Lookups()
    for _ in range(3):
        loss = sum(table.look_up("embedding", [1, 2]).sum() for _ in range(lookups))
        (gradient,) = torch.autograd.grad(loss, [table.weight], retain_graph=True)
        table.weight.grad = gradient
        assert sorted(ids_behind(table.weight).tolist()) == [1] * lookups + [2] * lookups
        # One that is only looked at changes nothing.
        table.weight.grad = None
        loss.backward(retain_graph=True)
        torch.autograd.grad(loss, [table.weight])
        assert sorted(ids_behind(table.weight).tolist()) == [1] * lookups + [2] * lookups


def test_a_gradient_of_zeros_has_no_ids():
    table = Lookups()
    for _ in range(3):
        backward([table.look_up("embedding", [1, 2])])
        assert sorted(ids_behind(table.weight).tolist()) == [1, 2]
        table.weight.grad.zero_()
        assert ids_behind(table.weight).tolist() == []


def test_a_hook_that_was_there_before_the_optimizer():
    table = torch.nn.Embedding(ROWS, DIM, sparse=True)
    table.weight.register_hook(lambda grad: grad / 2)
    CowClipAdam(table.parameters())
    table(torch.tensor([3, 1, 3])).sum().backward()
    assert sorted(ids_behind(table.weight).tolist()) == [1, 3, 3]


def test_a_table_that_is_trained_later():
    table = torch.nn.Embedding(ROWS, DIM, sparse=True)
    table.weight.requires_grad_(False)
    CowClipAdam(table.parameters())
    table.weight.requires_grad_()
    (table(torch.tensor([1, 2])) + table(torch.tensor([1, 2]))).sum().backward()
    assert sorted(ids_behind(table.weight).tolist()) == [1, 1, 2, 2]


class Doubled(torch.nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 2


def test_two_lookups_that_are_not_seen_have_lost_their_counts():
    table = Doubled(ROWS, DIM, sparse=True)
    CowClipAdam(table.parameters())
    ids = torch.tensor([1, 2])
    table(ids).sum().backward()
    assert ids_behind(table.weight).tolist() == [1, 2]
    table.weight.grad = None
    (table(ids) + table(ids)).sum().backward()
    assert ids_behind(table.weight) is None


def test_one_id_that_was_coalesced_has_lost_its_count():
    table = Lookups()
    backward([table.look_up("embedding", [3, 3, 3])])
    table.weight.grad = table.weight.grad.coalesce()
    assert ids_behind(table.weight) is None
    table.weight.grad = None
    backward([table.look_up("embedding", [3])])
    assert ids_behind(table.weight).tolist() == [3]


def test_modules_that_share_a_table():
    """Tied before the optimizer is made; one that came later is not seen until another is made."""
    first, second = (torch.nn.Embedding(ROWS, DIM, sparse=True) for _ in range(2))
    kept = CowClipAdam(first.parameters())
    second.weight = first.weight
    ids = torch.tensor([1, 2, 2])

    def found():
        first.weight.grad = None
        (first(ids).sum() + second(ids).sum()).backward()
        return ids_behind(first.weight)

    assert found() is None
    with pytest.raises(ValueError, match="the counts of its ids are lost"):
        kept.step()
    CowClipAdam(first.parameters())
    assert sorted(found().tolist()) == [1, 1, 2, 2, 2, 2]


def test_a_backward_that_fails_leaves_no_counts():
    table = Lookups()
    first, second = (table.look_up("embedding", [1, 2]) for _ in range(2))
    # The engine comes to the second lookup first, and no further.
    first.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward([first, second])
    backward([table.look_up("embedding", [4])])
    assert ids_behind(table.weight).tolist() == [4]


def test_lookups_in_a_checkpointed_part_count_once():
    table = Lookups()
    for reentrant in (False, True):
        table.weight.grad = None
        part = torch.utils.checkpoint.checkpoint(
            lambda start: table.look_up("embedding", [1, 2]) + start,
            torch.zeros((), requires_grad=True),
            use_reentrant=reentrant,
        )
        backward([part, table.look_up("embedding", [1, 2])])
        assert sorted(ids_behind(table.weight).tolist()) == [1, 1, 2, 2]


@pytest.mark.parametrize("order", ["lclc", "llcl", "lcll", "llcll"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_lookups_around_a_recomputed_part(order, reentrant):
    table, start = Lookups(), torch.zeros((), requires_grad=True)

    def look_up(start):
        return table.look_up("embedding", [1, 2, 1]) + start

    total = start
    for one in order:
        part = (
            torch.utils.checkpoint.checkpoint(look_up, start, use_reentrant=reentrant)
            if one == "c"
            else look_up(start)
        )
        total = total + part.sum()
    total.backward()
    count = len(order)
    assert sorted(ids_behind(table.weight).tolist()) == [1] * 2 * count + [2] * count


@pytest.mark.slow
@pytest.mark.parametrize("order", [("model", "optimizer"), ("optimizer", "model")])
def test_copies_count_too_and_nothing_is_kept_alive(order):
    made = {"model": nn.Embedding(ROWS, DIM, sparse=True)}
    made["optimizer"] = CowClipAdam(made["model"].parameters())
    copied = copy.deepcopy({name: made[name] for name in order})
    model = copied["model"]
    backward(model(torch.tensor([1, 2])) for _ in range(2))
    assert sorted(ids_behind(model.weight).tolist()) == [1, 1, 2, 2]
    copied["optimizer"].step()
    assert model.weight in copied["optimizer"].state
    alive = weakref.ref(model), weakref.ref(made["model"])
    del made, copied, model
    gc.collect()
    assert [one() for one in alive] == [None, None]


def test_a_dense_gradient_does_not_tell_which_rows_were_touched():
    made = nn.Embedding(5, 4)
    optimizer = CowClipAdam(made.parameters(), lr=0.1, l2=1e-2, clip=None, rows="touched")
    made(torch.tensor([1, 1])).sum().backward()
    before = made.weight.detach().clone()
    for counts, words in (
        ({}, r"dense.*rows='touched'.*sparse=True.*counts="),
        ({made.weight: torch.ones(4)}, r"have shape \(4,\); give one integer per row"),
    ):
        with pytest.raises(ValueError, match=words):
            optimizer.step(counts=counts)
    assert torch.equal(made.weight, before)
    optimizer.step(counts={made.weight: torch.tensor([0, 2, 0, 0, 0])})
    assert (made.weight != before).any(1).nonzero().flatten().tolist() == [1]


def test_a_dense_gradient_is_fine_without_clip():
    made, peer = nn.Embedding(5, 4), nn.Embedding(5, 4)
    peer.load_state_dict(made.state_dict())
    ours = CowClipAdam(made.parameters(), lr=0.1, eps=1e-8, clip=None, eps_placement="torch")
    theirs = torch.optim.Adam(peer.parameters(), lr=0.1, eps=1e-8)
    for optimizer, module in ((ours, made), (theirs, peer)):
        for ids in ([1, 2], [2, 2]):
            optimizer.zero_grad()
            module(torch.tensor(ids)).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(made.weight, peer.weight)


def test_a_coalesced_gradient_has_lost_its_counts_and_nothing_is_changed():
    good, bad = table(), table()
    optimizer = CowClipAdam([*good.parameters(), *bad.parameters()])
    for made in (good, bad):
        made(torch.tensor([1, 2, 2])).sum().backward()
    bad.weight.grad = bad.weight.grad.coalesce()
    before = good.weight.detach().clone()
    with pytest.raises(ValueError, match=r"coalesce\(\).*DistributedDataParallel.*GradScaler"):
        optimizer.step()
    assert torch.equal(good.weight, before)


def test_under_ddp_counts_must_be_passed():
    with process_group():
        made, alone = table(), table()
        optimizer = CowClipAdam(made.parameters(), lr=0.1)
        parallel = nn.parallel.DistributedDataParallel(made)
        # The second lookup is one that DDP does not see.
        (parallel(ids_of_step(0)).square().sum() + made(ids_of_step(1)).square().sum()).backward()
        with pytest.raises(ValueError, match="DistributedDataParallel"):
            optimizer.step()
        both = torch.cat([ids_of_step(0), ids_of_step(1)])
        optimizer.step(counts={made.weight: torch.bincount(both, minlength=20)})
        peer = CowClipAdam(alone.parameters(), lr=0.1)
        alone(both).square().sum().backward()
        peer.step()
        torch.testing.assert_close(made.weight, alone.weight)
        # If it ended the group with it, it would wait for a thread that waits for Python's lock.
        del parallel


@pytest.mark.parametrize(
    "optimizer_class, kind",
    [
        *((one, "embedding") for one in CLASSES.values()),
        *((CowClipAdam, kind) for kind in ("bag", "argument", "negative argument")),
    ],
)
def test_padding_rows_never_change(optimizer_class, kind):
    given = {"argument": 3, "negative argument": -17}.get(kind)
    if kind == "bag":
        made = nn.EmbeddingBag(20, 4, sparse=True, mode="sum", padding_idx=3)
    else:
        made = table(padding_idx=3 if given is None else None)
    nn.init.normal_(made.weight)
    before = made.weight.detach().clone()
    decays = {"l2": 0.1, "weight_decay": 0.1}
    optimizer = optimizer_class(made.parameters(), lr=0.1, padding_idx=given, **decays)
    for ids in ([3, 1, 1, 3], [4, 3, 3, 1]):
        optimizer.zero_grad()
        made(torch.tensor(ids).view(2, 2)).square().sum().backward()
        optimizer.step()
    assert torch.equal(made.weight[3], before[3])
    assert (made.weight != before).any(1).sum() == 19


@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"max_norm": 1.0}])
def test_modules_that_rescale_are_refused(options):
    (name,) = options
    made = table(**options)
    with pytest.raises(ValueError, match=name):
        CowClipAdam(made.parameters())
