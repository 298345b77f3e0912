"""How the processes of a run find each other, also after a restart."""

from __future__ import annotations

import time
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from stampede.engine.errors import TrainingStoppedError

_POLL_SECONDS = 0.01


def rendezvous() -> tuple[dist.Store, int, int]:
    """Store that the processes started together share, rank of this one, and their number.

    Rank and addresses are in the environment, as under torchrun.
    """
    store, rank, world_size = next(dist.rendezvous("env://"))
    # The store may be that of torchrun's agent, which outlives a restart: with the addresses of
    # processes that are gone (https://github.com/pytorch/pytorch/issues/135712).
    return dist.PrefixStore(agree_on_name(store, rank, world_size), store), rank, world_size


def agree_on_name(
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout: float = default_pg_timeout.total_seconds(),
) -> str:
    """A name that all ranks get and no earlier start of them has had.

    Numbers of restarts will not do: each of torchrun's agents counts its own.

    Args:
        store: may hold what earlier starts wrote.
        timeout: seconds that rank 0 waits for the others.

    Raises:
        TrainingStoppedError: on rank 0, some others are missing.
    """
    own = uuid4().hex
    if rank != 0:
        store.set(_key("hello", rank), own)
        name = store.get(_key("name for", own)).decode()
        store.set(_key("heard", name, rank), "")
        return name
    deadline = time.monotonic() + timeout
    missing = set(range(1, world_size))
    while missing:
        for other in list(missing):
            hello = _key("hello", other)
            # It may be that of a process that is gone; the name for it is read by nobody.
            if store.check([hello]):
                store.set(_key("name for", store.get(hello).decode()), own)
            if store.check([_key("heard", own, other)]):
                missing.remove(other)
        if missing and time.monotonic() > deadline:
            ranks = ", ".join(map(str, sorted(missing)))
            raise TrainingStoppedError(
                f"of {world_size} processes ranks {ranks} have not joined within {timeout:g} s; "
                "look at their output, and start all with the same address and number"
            )
        time.sleep(_POLL_SECONDS if missing else 0)
    return own


def _key(*parts: object) -> str:
    return "/".join(("stampede", "rendezvous", *map(str, parts)))
