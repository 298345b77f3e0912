"""Runs a function on several processes joined by gloo."""

import contextlib
import gc
import os
import pickle
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

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
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(
            _rank,
            (world_size, ranks_per_node or world_size, port, folder, function, arguments),
            nprocs=world_size,
            start_method=START_METHOD,
        )
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world_size)]


def free_port() -> int:
    """A port that nobody is given meanwhile: outside of the range that systems choose from."""
    while True:
        port = secrets.choice(range(20_000, 32_000))
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def _rank(rank, world_size, ranks_per_node, port, folder, function, arguments):
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank % ranks_per_node),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(ranks_per_node),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    # Guards of the optimizers look at every object of the process; those of imports are many.
    gc.freeze()
    result = function(*arguments)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(result))
    # Without the interpreter's own end, in which a thread of gloo may abort the process (seen once
    # in a run of all tests, after the result was written or just before).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
