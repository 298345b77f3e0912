"""The optimizers with CowClip against their equations in float64."""

import pytest
import torch
from torch import nn

from stampede.optim import (
    CowClip,
    CowClipAdam,
    CowClipSGD,
)
from support.one_table import CLASSES, EVERY_CLASS, ids_of_step, table
from support.reference import ReferenceTables

CLIPS = {
    "none": {},
    "global": {"threshold": 0.3},
    "field": {"threshold": 0.2},
    "row": {"threshold": 0.05},
    "field_adaptive": {"ratio": 0.05},
    "cowclip": {"ratio": 0.1, "bound": 1e-3},
}


class TwoTables:
    """The same training through sparse or dense gradients, and in the reference."""

    rows = (15, 6)

    def __init__(self, sparse=True):
        draw = torch.Generator().manual_seed(1)
        self.start = {
            "user": torch.randn(15, 3, generator=draw, dtype=torch.float64),
            "tags": torch.randn(6, 2, generator=draw, dtype=torch.float64) * 0.1,
        }
        self.user = nn.Embedding(15, 3, sparse=sparse, _weight=self.start["user"].clone())
        self.tags = nn.EmbeddingBag(
            6, 2, sparse=sparse, mode="sum", _weight=self.start["tags"].clone()
        )

    def parameters(self):
        return [self.user.weight, self.tags.weight]

    def ids(self, step):
        return ids_of_step(step, 15, 12), ids_of_step(100 + step, 6, 24).view(12, 2)

    def loss(self, step):
        user, tags = self.ids(step)
        return self._loss(self.user(user), self.tags(tags))

    def counts(self, step):
        return [
            torch.bincount(ids.flatten(), minlength=rows)
            for ids, rows in zip(self.ids(step), self.rows, strict=True)
        ]

    def reference_step(self, reference, step, lr=None):
        """Gradients of whole tables, by matrices of ones and zeros."""
        leaves = {name: w.clone().requires_grad_() for name, w in reference.weights.items()}
        user, tags = self.ids(step)
        chosen = nn.functional.one_hot(tags, 6).sum(1).double()
        self._loss(
            nn.functional.one_hot(user, 15).double() @ leaves["user"], chosen @ leaves["tags"]
        ).backward()
        counts = dict(zip(leaves, self.counts(step), strict=True))
        reference.step({name: leaf.grad for name, leaf in leaves.items()}, counts, lr)

    @staticmethod
    def _loss(user, tags):
        return (user.sin().sum(1) + tags.sum(1)).square().mean()


def reference_of(tables, rule, clip, **arguments):
    return ReferenceTables(tables.start, rule=rule, granularity=clip, **CLIPS[clip], **arguments)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("rows", ["all", "touched"])
@pytest.mark.parametrize("rule", CLASSES)
def test_follows_the_equations(rule, rows, clip):
    common = {"lr": 0.05, "l2": 1e-2, "weight_decay": 0.1, "rows": rows, "eps": 1e-7}
    if rule == "sgd":
        del common["eps"]
        common["momentum"] = 0.9
    tables = TwoTables()
    settings = CowClip(granularity=clip, **CLIPS[clip])
    optimizer = CLASSES[rule](tables.parameters(), clip=settings, **common)
    reference = reference_of(tables, rule, clip, **common)
    for step in range(5):
        optimizer.zero_grad()
        tables.loss(step).backward()
        optimizer.step()
        tables.reference_step(reference, step)
    assert clip == "none" or reference.clipped
    assert clip not in ("row", "cowclip") or reference.clipped < reference.touched
    assert reference.largest_count > 1
    for name, found in zip(reference.weights, tables.parameters(), strict=True):
        torch.testing.assert_close(found.detach(), reference.weights[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rows", ["all", "touched"])
@pytest.mark.parametrize("how", ["dense", "coalesced", "accumulated"])
@EVERY_CLASS
def test_counts_that_are_passed_give_the_same(optimizer_class, how, rows):
    results = []
    for usual in (True, False):
        tables = TwoTables(sparse=usual or how != "dense")
        optimizer = optimizer_class(tables.parameters(), lr=0.1, clip=CowClip(ratio=0.1), rows=rows)
        for step in range(3):
            optimizer.zero_grad()
            for part in range(2):
                tables.loss(2 * step + part).backward()
            counts = {}
            if not usual and how != "accumulated":
                for index, param in enumerate(tables.parameters()):
                    counts[param] = sum(tables.counts(2 * step + part)[index] for part in range(2))
                    if how == "coalesced":
                        param.grad = param.grad.coalesce()
            optimizer.step(counts=counts)
        results.append([param.detach() for param in tables.parameters()])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


def test_a_penalty_in_the_loss_reaches_rows_that_did_not_occur():
    made = table()
    before = made.weight.detach().clone()
    optimizer = CowClipSGD(made.parameters(), lr=0.1)
    (made(torch.tensor([1])).sum() + made.weight[7].sum()).backward()
    counts = torch.bincount(torch.tensor([1]), minlength=20)
    optimizer.step(counts={made.weight: counts})
    assert (made.weight != before).any(1).nonzero().flatten().tolist() == [1, 7]


def test_rows_touched_leaves_other_rows_alone():
    made = table()
    before = made.weight.detach().clone()
    optimizer = CowClipAdam(made.parameters(), lr=0.1, l2=1e-2, rows="touched")
    made(torch.tensor([3, 3, 7])).sum().backward()
    optimizer.step()
    assert (made.weight != before).any(1).nonzero().flatten().tolist() == [3, 7]
