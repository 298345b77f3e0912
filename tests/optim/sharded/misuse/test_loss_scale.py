"""A scaled loss is refused."""

import pytest
import torch
from torch import nn

from support.two_tables import Model, assert_trains, features, shard, weights_of


def test_a_scaled_loss_is_refused_and_changes_nothing():
    model = shard(Model())
    assert_trains(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = weights_of(model)
    with pytest.raises(ValueError, match=r"GradScaler scales the loss by 1024.*bf16 or fp32"):
        scaler.scale(model(features()).sum()).backward()
    with pytest.raises(ValueError, match="GradScaler"):
        torch.autograd.backward(scaler.scale([model(features()).sum()]))
    assert torch.equal(weights_of(model), before)
    assert_trains(model)


def test_a_scaler_that_does_not_scale_or_scales_something_else_is_fine():
    model, other = shard(Model()), nn.Linear(4, 1)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(2):
        scaler.scale(other(torch.ones(2, 4)).sum()).backward()
        assert_trains(model)
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    disabled.scale(model(features()).sum()).backward()
    torch.amp.GradScaler("cpu", init_scale=1.0).scale(model(features()).sum()).backward()
