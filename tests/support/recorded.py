"""Ranks that wait for each other, and what torch's flight recorder has of it."""

from datetime import timedelta

import torch
import torch.distributed as dist

from stampede.engine.monitoring.flight_recorder import last_collectives, recorded
from stampede.engine.processes import processes


def collectives_of_which_one_waits() -> str:
    """Of two ranks the second comes later; what the first knows meanwhile, and the second then."""
    with processes("cpu") as here:
        dist.all_reduce(torch.ones(2, 3))
        store = dist.distributed_c10d._get_default_store()
        if here.rank == 0:
            work = dist.all_reduce(torch.ones(7, dtype=torch.float64), async_op=True)
            told = last_collectives(recorded())
            store.set("told", "yes")
            work.wait()
        else:
            store.wait(["told"], timedelta(seconds=60))
            dist.all_reduce(torch.ones(7, dtype=torch.float64))
            told = last_collectives(recorded())
    return told
