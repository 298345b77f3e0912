"""CowClipAdam as an ordinary torch optimizer."""

import pytest
import torch
from torch import nn

from stampede.optim import CowClip, CowClipAdam


def table(rows=20, dim=4, seed=0):
    made = nn.Embedding(rows, dim, sparse=True)
    with torch.no_grad():
        made.weight.copy_(torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)))
    return made


def train(made, optimizer, steps, first=0):
    for step in range(first, first + steps):
        draw = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        (made(torch.randint(0, 20, (8,), generator=draw)).square().sum()).backward()
        optimizer.step()


def test_rows_touched_leaves_other_rows_alone():
    made = table()
    before = made.weight.detach().clone()
    optimizer = CowClipAdam(made.parameters(), lr=0.1, l2=1e-2, rows="touched")
    made(torch.tensor([3, 3, 7])).sum().backward()
    optimizer.step()
    changed = (made.weight != before).any(1).nonzero().flatten()
    assert changed.tolist() == [3, 7]


def test_two_lookups_before_a_step_add_their_counts():
    results = []
    for lookups in ([[3, 3, 3]], [[3, 3], [3]]):
        made = table()
        optimizer = CowClipAdam(made.parameters(), lr=0.1, clip=CowClip(ratio=0.1))
        for ids in lookups:
            (made(torch.tensor(ids)).sum() * 100).backward()
        optimizer.step()
        results.append(optimizer.state[made.weight]["exp_avg"])
    torch.testing.assert_close(*results)


def test_state_dict_continues_exactly():
    whole, first = table(), table()
    optimizer = CowClipAdam(whole.parameters(), lr=1e-2, l2=1e-3)
    train(whole, optimizer, 6)
    half = CowClipAdam(first.parameters(), lr=1e-2, l2=1e-3)
    train(first, half, 3)
    second = table(seed=1)
    second.load_state_dict(first.state_dict())
    resumed = CowClipAdam(second.parameters(), lr=0.5)
    resumed.load_state_dict(half.state_dict())
    train(second, resumed, 3, first=3)
    assert torch.equal(whole.weight, second.weight)


def test_schedulers_and_groups_and_closures_work():
    one, other = table(), table()
    optimizer = CowClipAdam([{"params": one.parameters(), "lr": 0.0}], lr=0.1)
    optimizer.add_param_group({"params": other.parameters(), "clip": None})
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    before = one.weight.detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = one(torch.tensor([1])).sum() + other(torch.tensor([1])).sum()
        loss.backward()
        return loss

    assert isinstance(optimizer.step(closure), torch.Tensor)
    scheduler.step()
    assert torch.equal(one.weight, before)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.05]


def test_a_dense_gradient_has_no_counts():
    made = nn.Embedding(5, 4)
    optimizer = CowClipAdam(made.parameters())
    made(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=True"):
        optimizer.step()


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


def test_a_coalesced_gradient_has_lost_its_counts():
    made = table()
    optimizer = CowClipAdam(made.parameters())
    made(torch.tensor([1, 2, 2])).sum().backward()
    made.weight.grad = made.weight.grad.coalesce()
    with pytest.raises(ValueError, match="coalesced"):
        optimizer.step()


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"lr": -1}, "lr is -1"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"eps": -1e-8}, "eps"),
        ({"l2": float("inf")}, "l2"),
        ({"rows": "some"}, "'all' or 'touched'"),
        ({"eps_placement": "tf"}, "'keras' or 'torch'"),
        ({"clip": 1.0}, "clip is 1.0"),
    ],
)
def test_settings_out_of_range_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        CowClipAdam(table().parameters(), **arguments)
