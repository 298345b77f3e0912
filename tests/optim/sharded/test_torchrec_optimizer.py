"""The optimizer of sharded tables as TorchRec's programs see it: state, checkpoints, rates."""

import copy
import math

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import row_wise
from torchrec.optim.optimizers import in_backward_optimizer_filter

import stampede.optim as optim
from stampede.optim import CowClip, TableInit, cowclip_sharders, local_cowclip_tables
from support import two_tables
from support.bags import PLANS, WHOLE, Bags, shard, step, weights_of, with_cowclip

WIDE, ROWS = (20, 8), (20,)


OF_EVERY_RULE = pytest.mark.parametrize(
    "kind, settings, expected",
    [
        ("CowClipAdam", {}, {"momentum1": WIDE, "exp_avg_sq": WIDE}),
        ("CowClipRowWiseAdam", {}, {"momentum1": WIDE, "exp_avg_sq": ROWS}),
        ("CowClipRowWiseAdam", {"clip": CowClip(columns=6)},
         {"momentum1": WIDE, "exp_avg_sq": ROWS, "exp_avg_sq_rest": ROWS}),
        ("CowClipAdagrad", {}, {"momentum1": WIDE}),
        ("CowClipRowWiseAdagrad", {}, {"momentum1": ROWS}),
        ("CowClipRowWiseAdagrad", {"clip": CowClip(columns=6)},
         {"momentum1": ROWS, "sum_rest": ROWS}),
        ("CowClipSGD", {}, {}),
        ("CowClipSGD", {"momentum": 0.9}, {"momentum1": WIDE}),
    ],
)  # fmt: skip


@OF_EVERY_RULE
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_keys_and_shapes_of_the_state(kind, settings, expected, plan):
    """The same under every plan."""
    model = shard(with_cowclip(Bags(a=8), getattr(optim, kind), **settings), plan)
    step(model)
    state = model.fused_optimizer.state_dict()["state"]["ebc.embedding_bags.a.weight"]
    assert int(state.pop("a.step")) == 1
    found = {key.removeprefix("a."): tuple(value.size()) for key, value in state.items()}
    assert found == expected


@OF_EVERY_RULE
def test_torchrecs_planner_counts_the_state(kind, settings, expected):
    def memory(model):
        planner = EmbeddingShardingPlanner(topology=Topology(world_size=1, compute_device="cpu"))
        planner.plan(model, cowclip_sharders())
        options = planner._enumerator.enumerate(model, cowclip_sharders())
        (found,) = [o for o in options if o.sharding_type == "table_wise"]
        return sum(shard.storage.ddr for shard in found.shards)

    model = with_cowclip(Bags(a=8), getattr(optim, kind), **settings)
    # TorchRec does not count a number per row beside others.
    counted = 4 * sum(map(math.prod, expected.values()))
    assert memory(model) - memory(Bags(a=8)) == pytest.approx(counted, abs=200)


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


def change_group(model, rate):
    for group in model.fused_optimizer.param_groups:
        group["lr"] = rate


def change_tables(model, rate):
    for tables in local_cowclip_tables(model):
        tables.set_learning_rate(rate)


def change_hyper_parameter(model, rate):
    model.fused_optimizer.update_hyper_parameters({"lr": rate})


CHANGES = (change_group, change_tables, change_hyper_parameter)
THEN = ("nothing", "step", "zero_grad")


@pytest.mark.parametrize(
    "plan, change, then",
    [
        (plan, change, THEN[(number + place) % 3])
        for number, plan in enumerate(PLANS.values())
        for place, change in enumerate(CHANGES)
    ],
)
def test_the_learning_rate_is_changed_as_torchrec_does(plan, change, then):
    model = shard(with_cowclip(Bags(a=8), rows="touched"), plan)

    def moves(rate):
        before = weights_of(model)["a"]
        change(model, rate)
        # TorchRec's own way forgets what the tables were told directly.
        if then != "nothing" and change is not change_tables:
            getattr(model.fused_optimizer, then)()
        step(model)
        return not torch.equal(weights_of(model)["a"], before)

    assert [moves(rate) for rate in (0.1, 0.0, 0.2, 0.0)] == [True, False, True, False]


def test_settings_that_cannot_be_changed_are_refused():
    model = shard(with_cowclip(Bags(a=8)))
    with pytest.raises(ValueError, match=r"got beta1, eps, but only lr can be changed"):
        model.fused_optimizer.update_hyper_parameters({"lr": 0.1, "eps": 1e-3, "beta1": 0.5})


@pytest.mark.parametrize("kind", ["Adam", "RowWiseAdam", "Adagrad", "SGD"])
def test_a_backward_moves_replicated_tables_once_and_like_sharded_ones(kind):
    found = []
    for plan in (PLANS["copies"], WHOLE):
        model = with_cowclip(Bags(a=8, b=4), getattr(optim, f"CowClip{kind}"))
        model = shard(model, plan, cowclip_sharders(TableInit(std=0.1)))
        # A dense optimizer that is given everything finds no gradients.
        dense = torch.optim.SGD(model.parameters(), lr=1.0)
        for ids in ((1, 1, 3), (3, 4), (0,)):
            dense.zero_grad()
            step(model, ids)
            assert all(parameter.grad is None for parameter in model.parameters())
            dense.step()
        found.append(weights_of(model))
        counted = sum(tables.row_counts for tables in local_cowclip_tables(model))
        assert counted[0] == 2 * (2 + 2 + 1)
        assert {int(tables.step_count) for tables in local_cowclip_tables(model)} == {3}
    assert all(torch.equal(found[0][name], found[1][name]) for name in "ab")


def test_tables_without_cowclip_stay_with_ddp():
    model = shard(with_cowclip(Bags(a=8, b=4), only="a"), PLANS["copies"])
    lookups = model.module.ebc._lookups
    (lookup,) = (one for one in lookups if isinstance(one, DistributedDataParallel))
    reduced, _ = lookup._build_params_for_reducer()
    assert [tuple(parameter.shape) for parameter in reduced] == [(20 * 4,)]
    before = weights_of(model)
    offered = dict(in_backward_optimizer_filter(model.named_parameters()))
    assert list(offered) == ["ebc.embedding_bags.b.weight"]
    step(model)
    after = weights_of(model)
    assert (after["a"] != before["a"]).any() and torch.equal(after["b"], before["b"])
    torch.optim.SGD(offered.values(), lr=0.1).step()
    changed = (weights_of(model)["b"] != before["b"]).any(1).nonzero().flatten()
    assert changed.tolist() == [1, 3]


def test_a_dense_norm_is_clipped_without_the_tables():
    """And sharders of a program's own may stand before ours."""
    sharders = [EmbeddingBagCollectionSharder(), *cowclip_sharders()]
    clipped, free = (
        two_tables.shard(two_tables.Model(), sharders),
        two_tables.shard(two_tables.Model()),
    )
    free.load_state_dict(clipped.state_dict())
    for model in (clipped, free):
        model(two_tables.features()).square().mean().backward()
    dense = torch.cat([p.grad.flatten() for p in free.module.dense.parameters()])
    norm = torch.nn.utils.clip_grad_norm_(clipped.parameters(), 1e-3)
    assert float(norm) == pytest.approx(float(dense.norm()))
    found = torch.cat([p.grad.flatten() for p in clipped.module.dense.parameters()])
    assert float(found.norm()) == pytest.approx(1e-3, rel=1e-2)
    assert torch.equal(two_tables.weights_of(clipped), two_tables.weights_of(free))
