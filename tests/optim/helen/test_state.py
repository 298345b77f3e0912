"""State that is saved and loaded."""

import copy

import torch
from torch import nn

from stampede.optim.helen import Helen
from support.helen_model import SETTINGS, Net, largest_difference, train


def test_state_dict_continues_exactly():
    whole, model = Net(), Net()
    settings = SETTINGS | dict(net_pert=True, dense_norm="last_table", l2=1e-3)
    train(whole, Helen(whole.by_kind(), **settings), 6)
    half = Helen(model.by_kind(), **settings)
    train(model, half, 3)
    resumed = Net()
    resumed.load_state_dict(model.state_dict())
    optimizer = Helen(resumed.by_kind())
    optimizer.load_state_dict(copy.deepcopy(half.state_dict()))
    assert optimizer.param_groups[1]["dense_norm"] == "last_table"
    train(resumed, optimizer, 3, first=3)
    assert largest_difference(whole, dict(resumed.named_parameters())) == 0.0


def test_tables_of_lower_precision_keep_float32_moments():
    table = nn.Embedding(6, 3, sparse=True, dtype=torch.bfloat16)
    optimizer = Helen([table.weight], l2=0.1, lr=0.1)

    def closure():
        loss = table(torch.tensor([0, 0, 2])).float().square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    again = Helen([table.weight])
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for name in ("exp_avg", "exp_avg_sq"):
        kept = again.state[table.weight][name]
        assert kept.dtype == torch.float32
        assert torch.equal(kept, optimizer.state[table.weight][name])
    again.zero_grad()
    again.step(closure)
    assert table.weight.dtype == torch.bfloat16 and torch.isfinite(table.weight).all()
