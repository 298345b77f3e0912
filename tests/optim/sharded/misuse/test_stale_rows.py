"""Rows that are not current are refused."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from support.two_tables import Model, assert_trains, features, shard, weights_of


def test_a_second_backward_of_one_forward_is_refused():
    model = shard(Model())
    loss = model(features()).sum()
    loss.backward(retain_graph=True)
    before = weights_of(model)
    with pytest.raises(ValueError, match=r"second backward of one forward.*look up again"):
        loss.backward()
    assert torch.equal(weights_of(model), before)
    assert_trains(model)


def test_rows_looked_up_before_the_last_update_are_refused():
    model = shard(Model())
    first, second = model(features(1)).sum(), model(features(2)).sum()
    first.backward()
    with pytest.raises(ValueError, match="TrainPipelineSparseDist"):
        second.backward()


def test_gradients_of_other_inputs_may_be_asked_for_any_time():
    model = shard(Model())
    dense = list(model.module.dense.parameters())
    before = weights_of(model)
    loss = model(features()).square().sum()
    gradients = torch.autograd.grad(loss, dense, create_graph=True)
    assert torch.equal(weights_of(model), before)
    (loss + sum(gradient.square().sum() for gradient in gradients).detach()).backward()
    assert not torch.equal(weights_of(model), before)


def test_only_reentrant_checkpointing_of_a_lookup_is_refused():
    model = shard(Model())
    start = torch.ones(1, requires_grad=True)

    def loss_of(reentrant):
        recomputed = checkpoint(
            lambda factor: (model(features(1)) * factor).sum(), start, use_reentrant=reentrant
        )
        return recomputed + model(features(2)).sum()

    before = weights_of(model)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        loss_of(reentrant=True).backward()
    assert torch.equal(weights_of(model), before)
    other = shard(Model())
    other.load_state_dict(model.state_dict())
    loss_of(reentrant=False).backward()
    (other(features(1)).sum() + other(features(2)).sum()).backward()
    assert torch.equal(weights_of(model), weights_of(other))
