"""The optimizer of sharded tables as TorchRec's programs see it: state, checkpoints, rates."""

import copy

import pytest
import torch
from torchrec.distributed.sharding_plan import row_wise

import stampede.optim as optim
from stampede.optim import CowClip
from support.bags import PLANS, Bags, shard, step, weights_of, with_cowclip

WIDE, ROWS = (20, 8), (20,)


@pytest.mark.parametrize(
    "kind, settings, expected",
    [
        ("CowClipAdam", {}, {"momentum1": WIDE, "exp_avg_sq": WIDE}),
        ("CowClipRowWiseAdam", {}, {"momentum1": WIDE, "exp_avg_sq": ROWS}),
        (
            "CowClipRowWiseAdam",
            {"clip": CowClip(columns=6)},
            {"momentum1": WIDE, "exp_avg_sq": ROWS, "exp_avg_sq_rest": ROWS},
        ),
        ("CowClipAdagrad", {}, {"momentum1": WIDE}),
        ("CowClipRowWiseAdagrad", {}, {"momentum1": ROWS}),
        (
            "CowClipRowWiseAdagrad",
            {"clip": CowClip(columns=6)},
            {"momentum1": ROWS, "sum_rest": ROWS},
        ),
        ("CowClipSGD", {}, {}),
        ("CowClipSGD", {"momentum": 0.9}, {"momentum1": WIDE}),
    ],
)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_keys_and_shapes_of_the_state(kind, settings, expected, plan):
    """The same under every plan."""
    model = shard(with_cowclip(Bags(a=8), getattr(optim, kind), **settings), plan)
    step(model)
    state = model.fused_optimizer.state_dict()["state"]["ebc.embedding_bags.a.weight"]
    assert int(state.pop("a.step")) == 1
    assert {key: tuple(value.size()) for key, value in state.items()} == {
        f"a.{key}": shape for key, shape in expected.items()
    }


def test_state_continues_exactly_under_another_plan():
    model = shard(with_cowclip(Bags(a=8)))
    step(model)
    state = model.fused_optimizer.state_dict()
    saved, weights = copy.deepcopy(state), copy.deepcopy(model.state_dict())
    step(model)
    other = shard(with_cowclip(Bags(a=8)), row_wise())
    other.load_state_dict(weights)
    other.fused_optimizer.load_state_dict(saved)
    step(other)
    assert torch.equal(weights_of(other)["a"], weights_of(model)["a"])


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_learning_rate_is_changed_as_torchrec_does(plan):
    model = shard(with_cowclip(Bags(a=8)), plan)
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 0.0
    model.fused_optimizer.step()
    before = weights_of(model)["a"]
    step(model)
    assert torch.equal(weights_of(model)["a"], before)
