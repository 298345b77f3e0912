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
def on_cpu(values: Any, *, copy: bool) -> Any:
    """Nested tensors, sharded ones included, on the CPU and as torch saves them without a copy.

    Args:
        copy: whether also tensors that lie on the CPU are copied; otherwise they share memory.
    """
    if isinstance(values, dict):
        return {key: on_cpu(value, copy=copy) for key, value in values.items()}
    moved: Tensor = values.cpu()
    if moved is not values:
        # From a GPU, and so a copy already.
        return moved
    taken = torch.clone if copy else _with_own_storage
    if not isinstance(values, ShardedTensor):
        return taken(values)
    shards = [Shard(taken(shard.tensor), shard.metadata) for shard in values.local_shards()]
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, values.metadata())


def _with_own_storage(tensor: Tensor) -> Tensor:
    """The same memory, but a storage that ends where the tensor does.

    Tables lie in one array; torch would copy them all, to save no more than each needs.
    """
    if not tensor.numel() or not tensor.is_contiguous():
        return tensor.clone()
    content = tensor.detach().view(-1).view(torch.uint8)
    return torch.from_numpy(content.numpy()).view(tensor.dtype).view(tensor.shape)
