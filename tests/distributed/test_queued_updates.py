"""Queued updates where a rank has no tables; Triton's interpreter runs the kernels."""

from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from stampede.optim import (
    CowClip,
    CowClipAdam,
    NonFiniteGradientError,
    cowclip_sharders,
    local_cowclip_tables,
    table_update,
)
from support.ranks import join, run_ranks
from support.updated_tables import computed

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


class OneTable(nn.Module):
    """A collection of one table, whose updates are queued: on two ranks one has none."""

    def __init__(self):
        super().__init__()
        config = EmbeddingBagConfig(
            name="t", embedding_dim=8, num_embeddings=50, feature_names=["f"]
        )
        self.ebc = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))

    def forward(self, ids):
        return self.ebc(ids).values()


def sharded():
    model = OneTable()
    arguments = {"lr": 1e-2, "l2": 1e-4, "clip": CowClip()}
    apply_optimizer_in_backward(CowClipAdam, model.ebc.parameters(), arguments)
    sharders = cowclip_sharders(backwards_per_step=None)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"),
        constraints={"t": ParameterConstraints(sharding_types=["table_wise"])},
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=sharders, init_data_parallel=False
    )


def train(way, lookups, poisoned=None):
    """Some steps of several lookups each; sums of the rows on each rank, and who has tables.

    Args:
        lookups: of each step.
        poisoned: number of a step, from 0, whose gradient is not finite.
    """
    join()
    with computed(way):
        model = sharded()
        found = None
        for step, count in enumerate(lookups):
            ids = torch.tensor([step, 3, 4, dist.get_rank()])
            lengths = torch.ones(4, dtype=torch.int32)
            batch = KeyedJaggedTensor.from_lengths_sync(keys=["f"], values=ids, lengths=lengths)
            loss = sum(model(batch).sum() for _ in range(count))
            (loss * float("nan") if step == poisoned else loss).backward()
        try:
            model.state_dict()
        except NonFiniteGradientError as failure:
            found = failure.ago
        tables = local_cowclip_tables(model)
        weights = [w.double().sum().item() for t in tables for w in t.split_embedding_weights()]
        is_queued = table_update(model).flag is not None
    dist.barrier()
    dist.destroy_process_group()
    return {"weights": weights, "found": found, "is_queued": is_queued}


@pytest.mark.slow
@pytest.mark.parametrize("lookups", [(1, 1, 1), (1, 2, 2, 1)], ids=["one", "several"])
def test_all_ranks_take_the_same_way_also_one_without_tables(lookups):
    queued = run_ranks(2, train, "queued", lookups)
    swept = run_ranks(2, train, "kernels", lookups)
    assert [rank["is_queued"] for rank in queued] == [True, True]
    assert sorted(len(rank["weights"]) for rank in queued) == [0, 1]
    for one, other in zip(queued, swept, strict=True):
        assert one["weights"] == pytest.approx(other["weights"], rel=1e-6)


def test_all_ranks_learn_of_a_gradient_that_is_not_finite():
    ranks = run_ranks(2, train, "queued", (1, 1, 1), 1)
    assert [rank["found"] for rank in ranks] == [1, 1]
