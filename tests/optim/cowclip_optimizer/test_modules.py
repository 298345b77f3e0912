"""Modules of tables: padding rows, options, and what is no table."""

import pytest
import torch
from torch import nn

from stampede.optim import (
    CowClipAdam,
)
from support.one_table import EVERY_CLASS, table, train


@EVERY_CLASS
@pytest.mark.parametrize("kind", ["embedding", "bag", "argument", "negative argument"])
def test_padding_rows_never_change(optimizer_class, kind):
    given = {"argument": 3, "negative argument": -17}.get(kind)
    if kind == "bag":
        made = nn.EmbeddingBag(20, 4, sparse=True, mode="sum", padding_idx=3)
    else:
        made = table(padding_idx=3 if given is None else None)
    nn.init.normal_(made.weight)
    before = made.weight.detach().clone()
    optimizer = optimizer_class(
        made.parameters(), lr=0.1, l2=0.1, weight_decay=0.1, padding_idx=given
    )
    for ids in ([3, 1, 1, 3], [4, 3, 3, 1]):
        optimizer.zero_grad()
        made(torch.tensor(ids).view(2, 2)).square().sum().backward()
        optimizer.step()
    assert torch.equal(made.weight[3], before[3])
    assert (made.weight != before).any(1).sum() == 19


def test_the_padding_row_of_one_of_two_modules_never_changes():
    padded = table(padding_idx=3)
    other = nn.Embedding(20, 4, sparse=True, _weight=torch.empty(20, 4))
    other.weight = padded.weight
    optimizer = CowClipAdam(padded.parameters(), lr=0.1)
    before = padded.weight.detach().clone()
    (other(torch.tensor([3, 4])).sum() + padded(torch.tensor([4])).sum()).backward()
    optimizer.step()
    assert (padded.weight != before).any(1).nonzero().flatten().tolist() == [4]


def test_padding_rows_that_differ_are_refused():
    one, other = table(padding_idx=3), table(padding_idx=0)
    other.weight = one.weight
    CowClipAdam(one.parameters())
    one(torch.tensor([1]))
    with pytest.raises(ValueError, match="give them the same"):
        other(torch.tensor([1]))
    alone = table(padding_idx=3)
    optimizer = CowClipAdam(alone.parameters(), padding_idx=4)
    with pytest.raises(ValueError, match="give the optimizer none"):
        train(alone, optimizer, 1)


@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"max_norm": 1.0}])
def test_modules_that_rescale_are_refused(options):
    (name,) = options
    made = table(**options)
    CowClipAdam(made.parameters())
    with pytest.raises(ValueError, match=name):
        made(torch.tensor([1]))


def test_parameters_that_are_no_tables_are_refused():
    for param, words in (
        (torch.zeros(3), "no table"),
        (torch.zeros(3, 2, 2), "no table"),
        (torch.zeros(3, 2).T, "contiguous"),
        (torch.zeros(3, 2, dtype=torch.int64), "floating-point"),
    ):
        with pytest.raises(ValueError, match=words):
            CowClipAdam([param])


def test_tables_on_several_devices_are_refused():
    tables = [table().weight, torch.zeros(3, 2, device="meta", requires_grad=True)]
    with pytest.raises(ValueError, match="one optimizer for each device"):
        CowClipAdam(tables).step()
