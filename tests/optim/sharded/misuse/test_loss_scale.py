"""A scaled loss is refused."""

import pytest
import torch
from torch import nn

from support.two_tables import Model, assert_trains, dense_optimizer, features, shard


def test_a_scaled_loss_is_refused_with_the_first_step():
    model = shard(Model())
    optimizer, scaler = dense_optimizer(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(features()).sum()).backward()
    with pytest.raises(ValueError, match=r"GradScaler scales the loss by 1024.*bf16 or fp32"):
        scaler.step(optimizer)


def test_a_scaler_that_does_not_scale_or_scales_something_else_is_fine():
    model, other = shard(Model()), nn.Linear(4, 1)
    scaler, optimizers = torch.amp.GradScaler("cpu"), [dense_optimizer(model)]
    optimizers.append(torch.optim.SGD(other.parameters(), lr=0.1))
    for _ in range(2):
        assert_trains(model)
        optimizers[0].step()
        scaler.scale(other(torch.ones(2, 4)).sum()).backward()
        scaler.step(optimizers[1])
        scaler.update()
    for options in ({"enabled": False}, {"init_scale": 1.0}):
        harmless = torch.amp.GradScaler("cpu", **options)
        harmless.scale(model(features()).sum()).backward()
        harmless.step(optimizers[0])
