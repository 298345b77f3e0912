"""Helen in plain PyTorch."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from stampede.optim.helen import Helen
from stampede.optim.nonfinite import NonFiniteGradientError
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


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"lr": -1}, "lr is -1"),
        ({"lr": "1e-4"}, "lr is '1e-4'"),
        ({"rho": float("nan")}, "rho is nan"),
        ({"bound": 1.5}, "bound is 1.5"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"eps": 0.0}, "eps is 0.0"),
    ],
)
def test_settings_out_of_range_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Helen(Net().by_kind(), **arguments)
    with pytest.raises(ValueError, match=words):
        Helen([group | arguments for group in Net().by_kind()])


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
    for table, words in ((dense, "sparse=True"), (sparse, "coalesced")):
        optimizer = Helen([{"params": table.parameters(), "kind": "embedding"}])
        table(torch.tensor([1, 2, 2])).sum().backward()
        if table is sparse:
            table.weight.grad = table.weight.grad.coalesce()
        with pytest.raises(ValueError, match=words):
            optimizer.first_step()


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


@pytest.mark.parametrize(
    "group_kind, sparse", [("embedding", True), ("dense", True), ("dense", False)]
)
@pytest.mark.parametrize("rows", ["all", "touched"])
def test_a_padding_row_never_changes(group_kind, sparse, rows):
    table = nn.Embedding(6, 3, sparse=sparse, padding_idx=1)
    with torch.no_grad():
        table.weight.fill_(2.0)
    settings = {"lr": 0.1, "rho": 0.5, "l2": 0.1, "weight_decay": 0.1, "net_pert": True}
    optimizer = Helen([{"params": [table.weight], "kind": group_kind}], rows=rows, **settings)
    seen = []

    def closure():
        seen.append(table.weight.detach().clone())
        loss = table(torch.tensor([0, 1, 1, 2])).square().sum()
        # A lookup that does not know of the padding gives the row a gradient.
        other = functional.embedding(torch.tensor([1, 2]), table.weight, sparse=sparse)
        return backward(loss + other.sum())

    for _ in range(3):
        optimizer.zero_grad()
        optimizer.step(closure)
    padding = torch.stack([*seen, table.weight.detach()])[:, 1]
    assert torch.equal(padding, torch.full_like(padding, 2.0))
    assert not optimizer.state[table.weight]["exp_avg"][1].any()
    assert (seen[1][[0, 2]] != 2.0).all() and (table.weight[[0, 2]] != 2.0).all()
    absent_move = rows == "all" or not sparse
    assert (table.weight[3:] != 2.0).all() == absent_move


@pytest.mark.parametrize("net_pert", [False, True])
def test_two_calls_equal_step_even_if_gradients_share_memory(net_pert):
    one, other = Net(), Net()
    train(one, Helen(one.by_kind(), net_pert=net_pert), 3)
    optimizer = Helen(other.by_kind(), net_pert=net_pert)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        closure = closure_of(other, step)
        closure()
        buffers = {param: param.grad for param in other.hidden.parameters()}
        optimizer.first_step()
        # DistributedDataParallel writes the second gradient where the first one was.
        for param, buffer in buffers.items():
            param.grad = buffer.zero_()
        closure()
        optimizer.second_step()
    assert largest_difference(one, dict(other.named_parameters())) == 0.0


@pytest.mark.parametrize("failure", [KeyError, NonFiniteGradientError])
def test_a_second_pass_that_fails_changes_nothing(failure):
    model, calls = Net(), []
    before = copy.deepcopy(model.state_dict())
    optimizer = Helen(model.by_kind(), l2=0.1)
    users, items, labels = batch(0)

    def closure():
        calls.append(1)
        is_second = len(calls) == 2
        if is_second and failure is KeyError:
            raise KeyError
        return backward(bce(model(users, items), labels) * (float("nan") if is_second else 1.0))

    with pytest.raises(failure):
        optimizer.step(closure)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert not any(state["step"] for state in optimizer.state.values())
    train(model, optimizer, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_state_dict_continues_exactly(dtype):
    whole, model, resumed = (Net(dtype) for _ in range(3))
    settings = SETTINGS | dict(net_pert=True, dense_norm="last_table", l2=1e-3)
    train(whole, Helen(whole.by_kind(), **settings), 6)
    half = Helen(model.by_kind(), **settings)
    train(model, half, 3)
    resumed.load_state_dict(model.state_dict())
    optimizer = Helen(resumed.by_kind())
    optimizer.load_state_dict(copy.deepcopy(half.state_dict()))
    assert optimizer.param_groups[1]["dense_norm"] == "last_table"
    # Moments of tables of lower precision are kept in float32.
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    moments = optimizer.state[resumed.user.weight]
    assert moments["exp_avg"].dtype == moments["exp_avg_sq"].dtype == kept
    train(resumed, optimizer, 3, first=3)
    assert largest_difference(whole, dict(resumed.named_parameters())) == 0.0
