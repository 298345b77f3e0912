"""Tables shared by modules, or sharded without our sharders, are refused."""

import pytest
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from stampede.optim import CowClipAdam, cowclip_sharders
from support.two_tables import CPU, Model, assert_trains, features, shard, tables, with_optimizer


def test_a_table_of_two_modules_is_refused():
    model = nn.Module()
    model.first, model.second = (EmbeddingBagCollection(tables("a")) for _ in range(2))
    model.second.embedding_bags["a"].weight = model.first.embedding_bags["a"].weight
    with pytest.raises(ValueError, match=r"'a'.*two modules.*feature_names of one table"):
        shard(model)


def test_torchrecs_own_sharders_refuse_the_optimizer():
    with pytest.raises(ValueError, match=r"Cannot cast .*CowClipAdam"):
        shard(Model(), get_default_sharders())


@pytest.mark.parametrize("sharding", ["data_parallel", "table_wise", "column_wise"])
def test_the_last_sharder_of_a_kind_is_the_one_that_counts(sharding):
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"),
        constraints={name: ParameterConstraints(sharding_types=[sharding]) for name in "ab"},
    )
    ours, theirs = cowclip_sharders(), get_default_sharders()
    model = with_optimizer(Model())
    plan = planner.plan(model, [*theirs, *ours])
    with pytest.raises(ValueError, match=r"Cannot cast .*CowClipAdam"):
        DistributedModelParallel(model, device=CPU, plan=plan, sharders=[*ours, *theirs])
    assert_trains(DistributedModelParallel(model, device=CPU, plan=plan, sharders=[*theirs, *ours]))


def test_a_table_that_was_not_sharded_is_refused_on_first_use():
    model = with_optimizer(Model())
    with pytest.raises(ValueError, match=r"pass sharders=cowclip_sharders\(\)"):
        model(features()).sum().backward()


def test_a_single_bag_with_an_optimizer_is_refused():
    """TorchRec's own sharder would drop the optimizer, and the bag would keep its first weights."""
    bag = nn.EmbeddingBag(20, 8, mode="sum", include_last_offset=True)
    apply_optimizer_in_backward(CowClipAdam, bag.parameters(), {"lr": 0.1})
    model = nn.Sequential(bag, nn.Linear(8, 1))
    with pytest.raises(ValueError, match=r"nn\.EmbeddingBag has the optimizer CowClipAdam"):
        DistributedModelParallel(model, device=CPU, sharders=cowclip_sharders())
