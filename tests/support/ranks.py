"""Runs a function on several processes joined by gloo."""

import gc
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from stampede.engine.processes import STORE_FILE, rank_environment
from support import small_runs
from support.forked import START_METHOD


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    ranks_per_node: int | None = None,
) -> list[Any]:
    """What `function(*arguments)` returned on each rank.

    The processes find their rank in the environment, as under torchrun.

    Args:
        ranks_per_node: ranks of one simulated node; all by default.
    """
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(
            _rank,
            (world_size, ranks_per_node, folder, function, arguments),
            nprocs=world_size,
            start_method=START_METHOD,
        )
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world_size)]


@contextmanager
def process_group() -> Iterator[None]:
    """Gloo: with the ranks that the environment names, or alone."""
    store, rank, world_size = dist.HashStore(), 0, 1
    if "RANK" in os.environ:
        store = dist.FileStore(os.environ[STORE_FILE])
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        yield
        # Without it, processes sometimes abort at exit; after an exception it would wait.
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _rank(rank, world_size, ranks_per_node, folder, function, arguments):
    store = Path(folder) / "store"
    os.environ.update(rank_environment(rank, world_size, store, ranks_per_node))
    torch.set_num_threads(1)
    small_runs.leave_out()
    # Guards of the optimizers look at every object of the process; those of imports are many.
    gc.freeze()
    result = function(*arguments)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(result))
    # Without the interpreter's own end, in which a thread of gloo may abort the process (seen once
    # in a run of all tests, after the result was written or just before).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
