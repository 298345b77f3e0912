"""What a checkpoint holds of a job, as tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

from stampede.engine.job import Job


def contents(job: Job, rank: int) -> dict[str, Any]:
    """Everything trained, as tensors that are read and written in place, and the random state.

    All rows of the tables are up to date. With several ranks all must call it at one point.

    Args:
        rank: of this process, whose random state is among them as a copy.
    """
    return {
        "model": job.model.state_dict(),
        "fused": job.model.fused_optimizer.state_dict()["state"],
        "dense": {
            name: job.dense_optimizer.state[parameter]
            for name, parameter in job.dense_parameters.items()
        },
        "random": {f"rank_{rank}": torch.get_rng_state()},
    }


@torch.no_grad()
def copied(values: Any) -> Any:
    """A copy of nested tensors on the CPU, sharded ones included."""
    if isinstance(values, dict):
        return {key: copied(value) for key, value in values.items()}
    on_cpu: Tensor = values.cpu()
    if on_cpu is not values:
        # From a GPU, and so a copy already.
        return on_cpu
    if not isinstance(values, ShardedTensor):
        return values.clone()
    shards = [Shard(shard.tensor.clone(), shard.metadata) for shard in values.local_shards()]
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, values.metadata())
