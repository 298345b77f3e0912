"""Rows that did not occur, and padding rows."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from stampede.optim.helen import Helen
from support.helen_model import Net, batch, counts_of, train


def test_touched_leaves_other_rows_and_their_moments_alone():
    model = Net()
    optimizer = Helen(model.by_kind(), lr=0.1, weight_decay=0.1, l2=0.1, rows="touched")
    train(model, optimizer, 1)
    seen = counts_of(*batch(0)[:2])["user.weight"] > 0
    train(model, optimizer, 1, first=1)
    now = counts_of(*batch(1)[:2])["user.weight"] > 0
    fresh = Net().user.weight
    assert torch.equal((model.user.weight != fresh).any(1), seen | now)
    assert torch.equal((optimizer.state[model.user.weight]["exp_avg"] != 0).any(1), seen | now)


def test_all_lets_absent_rows_coast():
    model = Net()
    optimizer = Helen(model.by_kind(), lr=0.1)
    train(model, optimizer, 1)
    after_first = model.user.weight.detach().clone()
    train(model, optimizer, 1, first=1)
    only_first = (counts_of(*batch(0)[:2])["user.weight"] > 0) & (
        counts_of(*batch(1)[:2])["user.weight"] == 0
    )
    assert only_first.any()
    assert (model.user.weight != after_first)[only_first].all()


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
        loss = bce(model(users, items) + pooled.sum(1), labels)
        loss.backward()
        return loss

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
    optimizer = Helen(
        [{"params": [table.weight], "kind": group_kind}],
        lr=0.1,
        rho=0.5,
        l2=0.1,
        weight_decay=0.1,
        rows=rows,
        net_pert=True,
    )
    seen = []

    def closure():
        seen.append(table.weight.detach().clone())
        loss = table(torch.tensor([0, 1, 1, 2])).square().sum()
        # A lookup that does not know of the padding gives the row a gradient.
        loss = loss + functional.embedding(torch.tensor([1, 2]), table.weight, sparse=sparse).sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        optimizer.step(closure)
    padding = torch.stack([*seen, table.weight.detach()])[:, 1]
    assert torch.equal(padding, torch.full_like(padding, 2.0))
    assert not optimizer.state[table.weight]["exp_avg"][1].any()
    assert (seen[1][[0, 2]] != 2.0).all() and (table.weight[[0, 2]] != 2.0).all()
    absent_move = rows == "all" or not sparse
    assert (table.weight[3:] != 2.0).all() == absent_move


def test_a_padding_row_is_no_part_of_the_norm():
    moves = []
    for padding in (0.0, 100.0):
        table = nn.Embedding(4, 2, sparse=True, padding_idx=3)
        with torch.no_grad():
            table.weight.fill_(1.0)[3] = padding
        optimizer = Helen([table.weight], rho=0.5, l2=0.1)
        table(torch.tensor([0, 0, 1])).sum().backward()
        optimizer.first_step()
        moves.append(table.weight[:3].detach().clone())
    torch.testing.assert_close(*moves)
