"""The processes of a run: rank, device and process group; they fail together."""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import default_pg_timeout

from stampede.engine.errors import TrainingStoppedError
from stampede.engine.start_up import launched_rank, launched_world_size
from stampede.engine.watching.heartbeat import Heartbeat
from stampede.settings import SettingsError

T = TypeVar("T")

# Timeout for preparing, reading or writing a terabyte.
PATIENCE = timedelta(hours=24)

# Checkpoints exchange CPU tensors, also when training on GPUs.
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}

# Environment variable with the store file of ranks, see `rank_environment`.
STORE_FILE = "STAMPEDE_STORE_FILE"


@dataclass(frozen=True)
class Processes:
    """This process among all of its run; `local_world_size` of them are on this machine.

    The groups wait for `PATIENCE`; one is only for the thread that writes checkpoints. `hosts` has
    the name of each rank's host.
    """

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    heartbeat: Heartbeat = field(default_factory=Heartbeat, compare=False)
    group: dist.ProcessGroup | None = field(default=None, compare=False)
    checkpoint_group: dist.ProcessGroup | None = field(default=None, compare=False)
    hosts: tuple[str, ...] = field(default=(), compare=False)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    @property
    def is_first_of_host(self) -> bool:
        """Whether no lower rank is on this machine."""
        return self.rank % self.local_world_size == 0

    @property
    def host_number(self) -> int:
        """From 0, which is the host of rank 0."""
        return self.rank // self.local_world_size

    def named(self, rank: int) -> str:
        """A rank for a sentence, with its host if there are several: `rank 3 on node2`."""
        return f"rank {rank} on {self.hosts[rank]}" if len(set(self.hosts)) > 1 else f"rank {rank}"

    def on_main(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0; all ranks return its result or raise its error."""
        outcome = [_outcome(action) if self.is_main else None]
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        return _result(*outcome[0])

    def gather(self, local: Tensor) -> list[Tensor] | None:
        """A tensor of each rank, all of one shape, on rank 0's CPU; None on other ranks."""
        local = local.detach().cpu().contiguous()
        received = None
        if self.is_main:
            received = [torch.empty_like(local) for _ in range(self.world_size)]
        dist.gather(local, received)
        return received

    def on_each_machine(self, action: Callable[[], object]) -> None:
        """Run `action` on the first rank of every machine; all ranks raise its error.

        The error names the host if there are several.
        """

        def act() -> None:
            try:
                action()
            except Exception as failure:
                # An OSError has a number, and makes its sentence of it.
                if len(set(self.hosts)) > 1 and len(failure.args) == 1:
                    failure.args = (f"on {self.hosts[self.rank]}: {failure}",)
                raise

        together(act if self.is_first_of_host else lambda: None, self.group)


def together(action: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Run `action` on every rank; each returns all results by rank, or raises an error."""
    outcomes = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, _outcome(action), group=group)
    return [_result(*outcome) for outcome in outcomes]


def _outcome(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as failure:
        return None, failure


def _result(result: T, failure: Exception | None) -> T:
    if failure is not None:
        failure.known_to_all_ranks = True
        raise failure
    return result


def choose_device(asked: str, key: str) -> torch.device:
    """The device that `key` asks for: `auto`, `cpu` or `cuda`; a GPU is made the current one."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise SettingsError(f"{key}: found 'cuda' but no GPU is available; write 'cpu' or 'auto'")
    if asked == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise SettingsError(
            f"{local_rank + 1} or more processes were started on this machine, which has "
            f"{torch.cuda.device_count()} GPUs; start one per GPU, or write run.device=cpu"
        )
    chosen = torch.device("cuda", local_rank)
    torch.cuda.set_device(chosen)
    return chosen


def peak_memory_bytes(device: torch.device) -> int:
    """Peak so far in bytes: of torch's tensors on a GPU, of the resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def processes(device: str) -> Iterator[Processes]:
    """The process group for the duration of the context: gloo on CPUs, NCCL on GPUs.

    One that is there already, as in a worker of Ray Train, is used and left.

    Raises:
        SettingsError: a GPU is asked for and there is none, the group cannot be used, or hosts have
            different numbers of processes.
        TrainingStoppedError: on rank 0, other processes do not join.
    """
    chosen = choose_device(device, "run.device")
    is_ours = not dist.is_initialized()
    if is_ours:
        _join(chosen)
    else:
        _check_group(chosen)
    groups: list[dist.ProcessGroup | None] = []
    try:
        # gloo keeps the files and threads of a group until the processes end, so all runs of these
        # processes share them.
        groups += (dist.new_group(backend="gloo", timeout=PATIENCE) for _ in range(2))
        world_size = dist.get_world_size()
        per_host = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
        hosts = together(lambda: (platform.node(), per_host), groups[0])
        _check_hosts(hosts)
        with denormals_as_zero():
            yield Processes(
                rank=dist.get_rank(),
                world_size=world_size,
                local_world_size=per_host,
                device=chosen,
                group=groups[0],
                checkpoint_group=groups[1],
                hosts=tuple(name for name, _ in hosts),
            )
        # Without it a process may exit while another still uses their connection, and abort it.
        dist.barrier()
    finally:
        for group in [None] if is_ours else groups:
            dist.destroy_process_group(group)


def _join(device: torch.device) -> None:
    """Make the process group of all that were started together."""
    rank, world_size = launched_rank(), launched_world_size()
    if "RANK" not in os.environ:
        store = dist.HashStore()
    else:
        if STORE_FILE in os.environ:
            store = connection()
            store.set_timeout(default_pg_timeout)
        else:
            store, *_ = next(dist.rendezvous("env://"))
        # The store may belong to torchrun's agent. It outlives a restart and still holds the
        # addresses of processes that are gone (https://github.com/pytorch/pytorch/issues/135712).
        store = dist.PrefixStore(agree_on_name(store, rank, world_size), store)
    backend = _BACKENDS[device.type]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def _check_group(device: torch.device) -> None:
    """Refuse a process group of somebody else that this run cannot use."""
    given = (launched_rank(), launched_world_size())
    found = (dist.get_rank(), dist.get_world_size())
    remedy = (
        "set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as "
        "torchrun does, or let stampede make the group"
    )
    if given != found:
        raise SettingsError(
            f"this is rank {found[0]} of {found[1]} in torch's process group, and rank {given[0]} "
            f"of {given[1]} in the environment; {remedy}"
        )
    # The watchdog makes a connection of its own.
    has_store = STORE_FILE in os.environ or {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    if found[1] > 1 and not has_store:
        raise SettingsError(
            "the environment does not say where the store of torch's process group is "
            f"(MASTER_ADDR and MASTER_PORT); {remedy}"
        )
    backends, needed = dist.get_backend_config(), _BACKENDS[device.type]
    if "cpu:" not in backends:
        raise SettingsError(
            f"torch's process group is made with the backend {backends!r}, which exchanges no CPU "
            f"tensors; make it with {needed!r}, in Ray Train by TorchConfig(backend={needed!r})"
        )


def _check_hosts(hosts: Sequence[tuple[str, int]]) -> None:
    """Refuse ranks that are not spread over hosts as torchrun does it: block by block, all alike.

    Args:
        hosts: the name of each rank's host, and how many ranks it takes to be there.
    """
    name, per_host = hosts[0]
    for rank, (host, count) in enumerate(hosts):
        if count != per_host:
            raise SettingsError(
                f"LOCAL_WORLD_SIZE: found {count} for rank {rank} on {host}, and {per_host} for "
                f"rank 0 on {name}; start as many processes on each host"
            )
        first = rank - rank % per_host
        if host != hosts[first][0]:
            raise SettingsError(
                f"rank {first} on {hosts[first][0]} and rank {rank} on {host} count as processes "
                "of one host; set LOCAL_WORLD_SIZE to the number of processes on each host, as "
                "torchrun does, and number those of a host one after another"
            )


@contextmanager
def denormals_as_zero() -> Iterator[None]:
    """Let this thread, and those that torch starts meanwhile, treat numbers below 1.2e-38 as 0.

    Products of weights that decay become such numbers after some 1,000 steps; an x86 processor
    takes a hundred times as long for each. Those other threads may keep it afterwards.
    """
    before = torch.full((), 1e-39).item() == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def rank_environment(
    rank: int, count: int, store: Path, per_machine: int | None = None
) -> dict[str, str]:
    """Environment variables of a rank whose run shares a store file."""
    per_machine = per_machine or count
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % per_machine),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(per_machine),
        STORE_FILE: str(store),
    }


def connection() -> dist.Store:
    """Another connection to the ranks' store, for a thread of its own."""
    if STORE_FILE in os.environ:
        return dist.FileStore(os.environ[STORE_FILE])
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=5),
    )


def agree_on_name(
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout: float = default_pg_timeout.total_seconds(),
) -> str:
    """A name for this start that all ranks share and no earlier start in this store has used.

    Counting restarts is not enough: each of torchrun's agents has its own count.
    """
    own, store = uuid4().hex, dist.PrefixStore("stampede/rendezvous", store)
    if rank != 0:
        store.set(f"hello/{rank}", own)
        name = store.get(f"name for/{own}").decode()
        store.set(f"heard/{name}/{rank}", "")
        return name
    deadline = time.monotonic() + timeout
    missing = set(range(1, world_size))
    while missing:
        for other in list(missing):
            # It may come from a process that is gone; nobody reads the answer then.
            if store.check([f"hello/{other}"]):
                store.set(f"name for/{store.get(f'hello/{other}').decode()}", own)
            if store.check([f"heard/{own}/{other}"]):
                missing.remove(other)
        if missing and time.monotonic() > deadline:
            ranks = ", ".join(map(str, sorted(missing)))
            raise TrainingStoppedError(
                f"of {world_size} processes ranks {ranks} have not joined within {timeout:g} s; "
                "look at their output, and start all with the same address and number"
            )
        time.sleep(0.01 if missing else 0)
    return own
