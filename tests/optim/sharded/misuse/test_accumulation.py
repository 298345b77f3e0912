"""Several backwards before a step of the dense optimizer are refused, unless allowed."""

import gc

import pytest
import torch
from torch import nn

from stampede.optim import (
    NonFiniteGradientError,
    cowclip_sharders,
)
from support.two_tables import Model, assert_trains, dense_optimizer, features, shard, weights_of


def test_accumulation_is_refused_after_the_first_step():
    model = shard(Model())
    optimizer = dense_optimizer(model)
    model(features()).sum().backward()
    optimizer.step()
    model(features()).sum().backward()
    before = weights_of(model)
    with pytest.raises(ValueError, match=r"gradient accumulation.*one_backward_per_step=False"):
        model(features()).sum().backward()
    assert torch.equal(weights_of(model), before)
    optimizer.step()
    assert_trains(model)


def test_accumulation_is_refused_before_the_first_step_too():
    model = shard(Model())
    optimizer = dense_optimizer(model)
    model(features()).sum().backward()
    before = weights_of(model)
    with pytest.raises(ValueError, match=r"gradient accumulation.*one_backward_per_step=False"):
        model(features()).sum().backward()
    assert torch.equal(weights_of(model), before)
    optimizer.step()
    assert_trains(model)


def test_an_optimizer_whose_constructor_raised_is_none():
    with pytest.raises(ValueError, match="learning rate") as raised:
        torch.optim.Adam([torch.zeros(1)], lr=-1.0)
    # The traceback in `raised` keeps the unfinished optimizer alive.
    assert_trains(shard(Model()))
    assert raised.tb is not None


def test_several_backwards_can_be_allowed():
    model = shard(Model(), cowclip_sharders(one_backward_per_step=False))
    optimizer = dense_optimizer(model)
    for _ in range(3):
        assert_trains(model)
        assert_trains(model)
        optimizer.step()


def test_programs_without_a_dense_optimizer_are_left_alone():
    model = shard(Model())
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    other.step()
    for _ in range(3):
        assert_trains(model)


def test_a_model_that_is_gone_leaves_no_hook_behind():
    from torch.optim.optimizer import _global_optimizer_post_hooks as hooks

    gc.collect()
    before = len(hooks)
    model = shard(Model())
    assert len(hooks) == before + 1
    del model
    gc.collect()
    assert len(hooks) == before


def test_a_skipped_batch_is_no_accumulation():
    model = shard(Model())
    optimizer = dense_optimizer(model)
    assert_trains(model)
    optimizer.step()
    for _ in range(2):
        with pytest.raises(NonFiniteGradientError):
            (model(features()).sum() * float("nan")).backward()
    assert_trains(model)
