"""Several backwards before a step of the dense optimizer add up where that is asked for."""

import gc

import pytest
import torch
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineBase
from torchrec.distributed.train_pipeline.gradient_accumulation import (
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
)

from stampede.optim import (
    NonFiniteGradientError,
    TableInit,
    cowclip_sharders,
    local_cowclip_tables,
)
from support.two_tables import Model, assert_trains, dense_optimizer, features, shard, weights_of


def test_accumulation_that_nobody_announced_is_refused_after_the_first_step():
    model = shard(Model())
    optimizer = dense_optimizer(model)
    model(features()).sum().backward()
    optimizer.step()
    model(features()).sum().backward()
    before = weights_of(model)
    with pytest.raises(ValueError, match=r"gradient accumulation.*backwards_per_step=N"):
        model(features()).sum().backward()
    assert torch.equal(weights_of(model), before)
    optimizer.step()
    assert_trains(model)


def test_tables_step_with_the_last_pass_that_was_announced():
    model = shard(Model(), cowclip_sharders(backwards_per_step=3))
    optimizer = dense_optimizer(model)
    for _ in range(2):
        before = weights_of(model)
        for _ in range(2):
            model(features()).sum().backward()
            assert torch.equal(weights_of(model), before)
        assert_trains(model)
        optimizer.step()
    assert [int(tables.step_count) for tables in local_cowclip_tables(model)] == [2]
    for _ in range(3):
        model(features()).sum().backward()
    with pytest.raises(ValueError, match="second update"):
        model(features()).sum().backward()


def test_a_step_that_failed_is_over_with_all_its_passes():
    model = shard(Model(), cowclip_sharders(backwards_per_step=2))
    for _ in range(2):
        before = weights_of(model)
        model(features()).sum().backward()
        with pytest.raises(NonFiniteGradientError):
            (model(features()).sum() * float("nan")).backward()
        assert torch.equal(weights_of(model), before)
    model(features()).sum().backward()
    assert torch.equal(weights_of(model), before)
    assert_trains(model)


@pytest.mark.parametrize("wrong", [0, -1])
def test_less_than_one_pass_is_refused(wrong):
    with pytest.raises(ValueError, match=f"backwards_per_step={wrong}.*1 or more, or None"):
        cowclip_sharders(backwards_per_step=wrong)


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def forward(self, batch):
        loss = self.model(batch).square().sum()
        return loss, loss


def sharded_with_loss(passes):
    torch.manual_seed(0)
    model = shard(WithLoss(), cowclip_sharders(TableInit(std=0.1), backwards_per_step=passes))
    return model, torch.optim.SGD(model.module.model.dense.parameters(), lr=0.1)


def test_torchrecs_wrapper_accumulates_also_where_an_epoch_ends_within_a_step():
    model, optimizer = sharded_with_loss(passes=2)
    pipeline = TrainPipelineBase(model, optimizer, torch.device("cpu"))
    wrapped = GradientAccumulationWrapper(
        pipeline, optimizer, model, GradientAccumulationConfig(num_steps=2)
    )
    batches = iter([features(number) for number in range(5)])
    with pytest.raises(StopIteration):
        while True:
            wrapped.progress(batches)
    found = weights_of(model), model.module.model.dense.weight
    steps = [int(tables.step_count) for tables in local_cowclip_tables(model)]

    model, optimizer = sharded_with_loss(passes=1)
    for numbers in ((0, 1), (2, 3), (4,)):
        optimizer.zero_grad()
        sum(model(features(number))[0] for number in numbers).backward()
        optimizer.step()
    assert steps == [int(tables.step_count) for tables in local_cowclip_tables(model)] == [3]
    torch.testing.assert_close(found[0], weights_of(model), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[1], model.module.model.dense.weight, rtol=1e-4, atol=1e-6)


def test_several_backwards_can_be_allowed():
    model = shard(Model(), cowclip_sharders(backwards_per_step=None))
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
