"""Gradients without counts, and counts that are passed."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stampede.optim import (
    CowClipAdam,
)
from support.one_table import ids_of_step, table


def test_a_dense_gradient_has_no_counts():
    made = nn.Embedding(5, 4)
    optimizer = CowClipAdam(made.parameters())
    made(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"dense.*sparse=True.*counts="):
        optimizer.step()


def test_a_dense_gradient_does_not_tell_which_rows_were_touched():
    made = nn.Embedding(5, 4)
    optimizer = CowClipAdam(made.parameters(), lr=0.1, l2=1e-2, clip=None, rows="touched")
    made(torch.tensor([1, 1])).sum().backward()
    before = made.weight.detach().clone()
    with pytest.raises(ValueError, match=r"dense.*rows='touched'.*sparse=True.*counts="):
        optimizer.step()
    assert torch.equal(made.weight, before)
    optimizer.step(counts={made.weight: torch.tensor([0, 2, 0, 0, 0])})
    changed = (made.weight != before).any(1).nonzero().flatten()
    assert changed.tolist() == [1]


def test_a_dense_gradient_is_fine_without_clip():
    made = nn.Embedding(5, 4)
    peer = nn.Embedding(5, 4)
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
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
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
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "counts",
    [
        torch.ones(19, dtype=torch.int64),
        torch.ones(20),
        torch.ones(20, 1, dtype=torch.int64),
        torch.full((20,), -1),
    ],
)
def test_counts_that_do_not_fit_are_refused(counts):
    made = table()
    optimizer = CowClipAdam(made.parameters())
    made(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="one integer of at least 0 per row"):
        optimizer.step(counts={made.weight: counts})


def test_counts_of_something_else_are_refused():
    made = table()
    optimizer = CowClipAdam(made.parameters())
    made(torch.tensor([1])).sum().backward()
    for key in (made, table().weight, "weight"):
        with pytest.raises(ValueError, match=r"module\.weight"):
            optimizer.step(counts={key: torch.ones(20, dtype=torch.int64)})


def test_gradients_of_other_layouts_are_refused():
    made = table()
    optimizer = CowClipAdam(made.parameters())
    made.weight.grad = torch.ones(20, 4).to_sparse()
    with pytest.raises(ValueError, match="neither dense nor sparse by rows"):
        optimizer.step()
