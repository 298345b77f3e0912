"""What to say of a run that does not fit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from stampede.engine.config import Config
from stampede.engine.config.embedding_optimizers import EmbeddingOptimSection
from stampede.engine.planning.sizes import readable
from stampede.engine.planning.states import table_states

if TYPE_CHECKING:
    from stampede.engine.planning.dry_run import DryRun

# The tables' optimizers that keep less than Adam, those nearest to it first.
_SMALLER = ("rowwise_adam", "adagrad", "rowwise_adagrad", "sgd")

# Even the best plans are not even: so much above an even share is asked of what is proposed.
_UNEVEN = 1.05


def shortfall(config: Config, done: DryRun) -> str:
    """The rank that lacks most, and what would do instead."""
    cluster, total = done.cluster, done.figures.total_memory
    rank = done.figures.worst_rank
    beside = ""
    if cluster.reserved:
        beside = (
            f" ({cluster.reserved:.0%} of {readable(cluster.memory)} are kept free for CUDA, NCCL "
            "and fragments)"
        )
    return (
        f"rank {rank} needs {readable(total[rank])} of {readable(cluster.usable)}{beside}: "
        f"{readable(total[rank] - cluster.usable)} too much, and "
        f"{int((total > cluster.usable).sum())} of {cluster.world_size} ranks lack memory. "
        + _what_to_try(config, done)
    )


def _what_to_try(config: Config, done: DryRun) -> str:
    needed = done.cluster.usable
    tries = []
    if config.sharding.plan != "auto" and done.work.even_bytes() * _UNEVEN <= needed:
        tries.append("sharding.plan=auto or row_wise (an even share would fit)")
    else:
        devices = _devices(done)
        if devices is not None:
            tries.append(f"--world-size {devices} or more")
        enough = math.ceil(done.figures.total_memory.max() / (1.0 - done.cluster.reserved) / 1e9)
        tries.append(f"--device-memory {enough}GB or more")
        optimizer = _optimizer(config, done)
        if optimizer is not None:
            tries.append(f"optim.embedding.optimizer={optimizer}")
    tries.append("fewer rows or a smaller model.dim")
    if done.figures.memory["activations"].max() > 0.2 * needed:
        tries.append("a smaller train.batch_size")
    return f"Try {', '.join(tries[:-1])}, or {tries[-1]}"


def _devices(done: DryRun) -> int | None:
    """Whole nodes that would hold even shares; None where more devices do not help."""
    work, node = done.work, done.cluster.local_world_size
    room = done.cluster.usable / _UNEVEN - work.common_bytes()
    if room <= 0:
        return None
    nodes = math.ceil(work.table_bytes() / room / node)
    return max(nodes * node, done.cluster.world_size + node)


def _optimizer(config: Config, done: DryRun) -> str | None:
    """The first that keeps little enough; None where none does."""
    work = done.work
    for name in _SMALLER:
        states = table_states(_with_optimizer(config, name), config.model.dim, work.columns)
        smaller = replace(work, states=states)
        is_smaller = smaller.table_bytes() < work.table_bytes()
        if is_smaller and smaller.even_bytes() * _UNEVEN <= done.cluster.usable:
            return name
    return None


def _with_optimizer(config: Config, name: str) -> Config:
    """The same with another optimizer of the tables, its other keys as they are by default."""
    section = TypeAdapter(EmbeddingOptimSection).validate_python({"optimizer": name})
    optim = config.optim.model_copy(update={"embedding": section})
    return config.model_copy(update={"optim": optim})
