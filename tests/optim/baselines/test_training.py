"""Baselines in a training run: beside our rule, with schedules and checkpoints."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchrec.distributed.sharding_plan import (
    row_wise,
)

from stampede.optim import CowClip, CowClipAdam, cowclip_sharders
from stampede.optim.baselines import baseline_optimizer
from support.fbgemm_baselines import ON_CPU, ROWS, Expected, batch, shard, tables, train


def test_the_step_can_be_set_before_the_first_lookup():
    """What `fbgemm_adam` needs after a checkpoint, tried with a rule that runs here."""
    model = shard({"a": baseline_optimizer("fbgemm_rowwise_adagrad", device_type="cpu", lr=0.1)})
    model.fused_optimizer.set_optimizer_step(5)
    train(model, *batch(12)[:2])
    (lookup,) = model.module.ebc._lookups
    assert int(lookup._emb_modules[0].emb_module.iter_cpu) == 6


def test_our_rule_and_baselines_share_a_collection():
    settings = {"lr": 0.05, "eps": 1e-4}
    rules = {
        name: baseline_optimizer(name, device_type="cpu", **settings, **own)
        for name, own in ON_CPU.items()
    }
    clip = CowClip(ratio=0.5, bound=1e-3)
    ours = {"ours": (CowClipAdam, {"lr": 0.01, "l2": 1e-3, "clip": clip})}
    together = shard({**ours, **rules}, sharder=cowclip_sharders()[0])
    alone = shard(ours, sharder=cowclip_sharders()[0])
    before = tables(together)["ours"].clone()
    tables(alone)["ours"].copy_(before)
    expected = {
        name: Expected(name, tables(together)[name], **settings, **own)
        for name, own in ON_CPU.items()
    }
    for _ in range(4):
        ids, bags, rows = batch(12)
        train(together, ids, bags)
        train(alone, ids, bags)
        for table in expected.values():
            table.step(rows, ids.flatten().tolist())
    found = tables(together)
    assert not torch.equal(found["ours"], before)
    assert torch.equal(found["ours"], tables(alone)["ours"])
    for name, table in expected.items():
        torch.testing.assert_close(found[name].double(), table.weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ON_CPU)
def test_the_learning_rate_is_changed_as_torchrec_does(name):
    model = shard({"a": baseline_optimizer(name, device_type="cpu", lr=0.1)})
    before = tables(model)["a"].clone()
    expected = Expected(name, before, lr=0.0)
    for lr in (0.0, 0.2):
        for group in model.fused_optimizer.param_groups:
            group["lr"] = expected.lr = lr
        model.fused_optimizer.step()
        ids, bags, rows = batch(12)
        train(model, ids, bags)
        expected.step(rows, ids.flatten().tolist())
        if lr == 0:
            assert torch.equal(tables(model)["a"], before)
    torch.testing.assert_close(tables(model)["a"].double(), expected.weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name, keys",
    [("fbgemm_rowwise_adagrad", ["momentum1"]),
     ("fbgemm_cowclip", ["momentum1", "prev_iter", "row_counter"])],
)  # fmt: skip
def test_a_checkpoint_continues_exactly_under_another_plan(name, keys, tmp_path):
    rule = baseline_optimizer(name, device_type="cpu", lr=0.1, **ON_CPU[name])
    batches = [batch(12)[:2] for _ in range(6)]
    model = shard({"a": rule})
    for ids, bags in batches[:3]:
        train(model, ids, bags)
    state = model.fused_optimizer.state_dict()["state"]["ebc.embedding_bags.a.weight"]
    assert {key: tuple(value.size()) for key, value in state.items()} == {
        f"a.{key}": (ROWS,) for key in keys
    }
    dcp.save(trained(model), checkpoint_id=str(tmp_path))
    for ids, bags in batches[3:]:
        train(model, ids, bags)

    other = shard({"a": rule}, kind=row_wise)
    dcp.load(trained(other), checkpoint_id=str(tmp_path))
    for ids, bags in batches[3:]:
        train(other, ids, bags)
    assert torch.equal(tables(other)["a"], tables(model)["a"])


def trained(model):
    """Tables and their optimizer's state, read and written in place."""
    return {"model": model.state_dict(), "fused": model.fused_optimizer.state_dict()["state"]}
