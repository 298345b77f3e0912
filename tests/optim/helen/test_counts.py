"""Counts of lookups, told by gradients or refused."""

import pytest
import torch
from torch import nn

from stampede.optim.helen import Helen
from support.helen_model import ROWS


def test_gradients_without_counts_are_refused():
    dense, sparse = nn.Embedding(5, 4), nn.Embedding(5, 4, sparse=True)
    for table, words in ((dense, "sparse=True"), (sparse, "coalesced")):
        optimizer = Helen([{"params": table.parameters(), "kind": "embedding"}])
        table(torch.tensor([1, 2, 2])).sum().backward()
        if table is sparse:
            table.weight.grad = table.weight.grad.coalesce()
        with pytest.raises(ValueError, match=words):
            optimizer.first_step()


def lookups(optimizer, table, parts):
    def closure():
        values = torch.cat([table(torch.tensor(ids)) for ids in parts])
        loss = (values * torch.arange(1.0, 4.0)).tanh().sum()
        loss.backward()
        return loss

    optimizer.zero_grad()
    optimizer.step(closure)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_several_lookups_of_a_table_add_their_counts(kind):
    """torch merges the entries of their gradients, so that the gradient alone tells too little."""

    def trained(parts, steps=3):
        torch.manual_seed(0)
        table = kind(
            ROWS["item"], 3, sparse=True, **({} if kind is nn.Embedding else {"mode": "sum"})
        )
        optimizer = Helen([table.weight], lr=0.1, rho=0.5, bound=0.0, l2=0.01)
        shape = (lambda ids: ids) if kind is nn.Embedding else (lambda ids: [[i] for i in ids])
        for _ in range(steps):
            lookups(optimizer, table, [shape(ids) for ids in parts])
        return table.weight

    once = trained([[0, 1, 0, 1, 0, 1, 0]])
    torch.testing.assert_close(trained([[0, 1], [0, 1], [0, 1], [0]]), once)
    torch.testing.assert_close(trained([[0, 1, 0], [1], [0, 1, 0]]), once)


def test_counts_of_several_lookups_decide_how_far_rows_move():
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = Helen([table.weight], rho=0.5, bound=0.0)
    before = table.weight.detach().clone()
    parts = ([0, 1], [0, 1], [0, 1], [0])
    # Multiplied, because torch merges only gradients that are contiguous.
    sum((table(torch.tensor(ids)) * torch.ones(3)).sum() for ids in parts).backward()
    optimizer.first_step()
    moved = (table.weight.detach() - before).norm(dim=1)
    # Gradients are 4 and 3 in every column, counts 4 and 3.
    torch.testing.assert_close(moved[:2], 0.5 * torch.tensor([4 / 5, 3 / 5 * 3 / 4]))
    assert not moved[2:].any()


def test_a_gradient_that_is_coalesced_after_several_lookups_is_refused():
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = Helen([table.weight])
    before = table.weight.detach().clone()
    (table(torch.tensor([0, 1])) + table(torch.tensor([1, 1]))).sum().backward()
    table.weight.grad = table.weight.grad.coalesce()
    with pytest.raises(ValueError, match="coalesced"):
        optimizer.first_step()
    assert torch.equal(table.weight, before)
