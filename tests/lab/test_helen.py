"""Helen in plain PyTorch, against its formulas in float64."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from stampede.lab.helen import Helen
from support.helen_reference import ReferenceHelen

ROWS = {"user": 40, "item": 12, "wide": 40}


class Net(nn.Module):
    """Two tables, a first-order table and a small MLP."""

    def __init__(self, dtype=torch.float64, sparse=True):
        super().__init__()
        torch.manual_seed(0)
        self.user = nn.Embedding(ROWS["user"], 4, sparse=sparse)
        self.item = nn.EmbeddingBag(ROWS["item"], 3, sparse=sparse, mode="sum")
        self.wide = nn.Embedding(ROWS["wide"], 1, sparse=sparse)
        self.hidden = nn.Linear(7, 6)
        self.out = nn.Linear(6, 1)
        self.to(dtype)

    def forward(self, users, items):
        both = torch.cat([self.user(users), self.item(items)], dim=1)
        return (self.out(torch.tanh(self.hidden(both))) + self.wide(users)).squeeze(1)

    def by_kind(self):
        tables = {self.user.weight, self.item.weight}
        dense = [param for param in self.parameters() if param not in tables]
        return [
            {"params": [self.user.weight, self.item.weight], "kind": "embedding"},
            {"params": dense, "kind": "dense"},
        ]


def batch(step):
    """Ids with heads and tails: some rows many times, most never."""
    draw = torch.Generator().manual_seed(step)
    users = (torch.rand(16, generator=draw) ** 3 * ROWS["user"]).long()
    items = (torch.rand(16, 2, generator=draw) ** 3 * ROWS["item"]).long()
    return users, items, (torch.rand(16, generator=draw) > 0.5).double()


def bce(logits, labels):
    return functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))


def backward(loss):
    loss.backward()
    return loss


def closure_of(model, step):
    users, items, labels = batch(step)
    return lambda: backward(bce(model(users, items), labels))


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        optimizer.step(closure_of(model, step))


def reference_after(model, steps, **settings):
    weights = dict(model.named_parameters())
    dense = Net(sparse=False)
    peer = ReferenceHelen(weights, ("user.weight", "item.weight"), **settings)
    for step in range(steps):
        users, items, labels = batch(step)

        def loss(weights, users=users, items=items, labels=labels):
            return bce(functional_call(dense, weights, (users, items)), labels)

        user = torch.bincount(users, minlength=ROWS["user"])
        item = torch.bincount(items.flatten(), minlength=ROWS["item"])
        counts = {"user.weight": user, "item.weight": item, "wide.weight": user}
        peer.step(loss, counts, step + 1)
    return peer.weights


def largest_difference(model, weights):
    return max(
        float((p.detach().double() - weights[n].detach()).abs().max())
        for n, p in model.named_parameters()
    )


SETTINGS = dict(lr=1e-2, rho=0.3, bound=0.4, weight_decay=1e-2)


@pytest.mark.parametrize("l2", [0.0, 0.05])
@pytest.mark.parametrize(
    "net_pert, dense_norm", [(False, "all"), (True, "all"), (True, "last_table")]
)
def test_steps_are_those_of_the_formulas(net_pert, dense_norm, l2):
    settings = SETTINGS | dict(net_pert=net_pert, dense_norm=dense_norm)
    model = Net()
    everywhere = {name: l2 for name, _ in model.named_parameters() if l2}
    expected = reference_after(model, 8, l2=everywhere, **settings)
    train(model, Helen(model.by_kind(), l2=l2, **settings), 8)
    assert largest_difference(model, expected) < 1e-12


def test_gradients_without_counts_are_refused():
    dense, sparse = nn.Embedding(5, 4), nn.Embedding(5, 4, sparse=True)
    for table, words in ((dense, "dense or"), (sparse, "coalesced")):
        optimizer = Helen([{"params": table.parameters(), "kind": "embedding"}])

        def closure(table=table):
            loss = backward(table(torch.tensor([1, 2, 2])).sum())
            if table.sparse:
                table.weight.grad = table.weight.grad.coalesce()
            return loss

        with pytest.raises(ValueError, match=words):
            optimizer.step(closure)


def test_parameters_without_gradient_and_empty_batches_are_left_out():
    model = Net()
    groups = model.by_kind()
    unused, empty = nn.Parameter(torch.ones(3)), nn.EmbeddingBag(5, 2, sparse=True, mode="sum")
    groups[1]["params"].append(unused)
    groups[0]["params"].append(empty.weight)
    optimizer = Helen(groups, net_pert=True)
    users, items, labels = batch(0)
    nothing = torch.empty(0, dtype=torch.int64)

    def closure():
        pooled = empty(nothing, torch.zeros(len(users), dtype=torch.int64))
        return backward(bce(model(users, items) + pooled.sum(1), labels))

    before = empty.weight.detach().clone()
    optimizer.step(closure)
    assert torch.equal(unused, torch.ones(3)) and unused not in optimizer.state
    assert torch.equal(empty.weight, before)


def test_a_second_pass_that_fails_changes_nothing():
    model, calls = Net(), []
    before = copy.deepcopy(model.state_dict())
    optimizer = Helen(model.by_kind(), l2=0.1)
    users, items, labels = batch(0)

    def closure():
        calls.append(1)
        if len(calls) == 2:
            raise KeyError
        return backward(bce(model(users, items), labels))

    with pytest.raises(KeyError):
        optimizer.step(closure)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert not optimizer.state
    train(model, optimizer, 1)


def test_state_dict_continues_exactly():
    whole, model, resumed = (Net() for _ in range(3))
    settings = SETTINGS | dict(net_pert=True, dense_norm="last_table", l2=1e-3)
    train(whole, Helen(whole.by_kind(), **settings), 6)
    half = Helen(model.by_kind(), **settings)
    train(model, half, 3)
    resumed.load_state_dict(model.state_dict())
    optimizer = Helen(resumed.by_kind())
    optimizer.load_state_dict(copy.deepcopy(half.state_dict()))
    train(resumed, optimizer, 3, first=3)
    assert largest_difference(whole, dict(resumed.named_parameters())) == 0.0
