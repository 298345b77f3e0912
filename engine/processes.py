"""The processes of a run: rank, device, process group, and how they fail together."""

from __future__ import annotations

import os
import subprocess
import tempfile
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
from torch.distributed.distributed_c10d import default_pg_timeout

from stampede.engine.errors import TrainingStoppedError, launched_rank
from stampede.engine.heartbeat import Heartbeat
from stampede.engine.start_up import launched_world_size
from stampede.files import APPEND, open_file
from stampede.settings import SettingsError

T = TypeVar("T")

# To prepare a terabyte, or to read or write it once.
PATIENCE = timedelta(hours=24)

# Names the file that is the store of ranks that `start_ranks` has started.
STORE_FILE = "STAMPEDE_STORE_FILE"


@dataclass(frozen=True)
class Processes:
    """This process among all.

    Attributes:
        rank, world_size: number of this process, and of all.
        local_world_size: processes on this machine.
        device: device of this process.
        heartbeat: where this process is in its run.
    """

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    heartbeat: Heartbeat = field(default_factory=Heartbeat, compare=False)
    _groups: dict[timedelta, dist.ProcessGroup] = field(default_factory=dict, compare=False)

    def group(self, patience: timedelta) -> dist.ProcessGroup:
        """All processes, with another timeout; all must call it. It is made once.

        A group of gloo keeps files and threads as long as the processes live.
        """
        if patience not in self._groups:
            self._groups[patience] = dist.new_group(backend="gloo", timeout=patience)
        return self._groups[patience]

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def on_main(self, action: Callable[[], T], patience: timedelta | None = None) -> T:
        """Run `action` on rank 0; all ranks get its result, or raise its error together.

        Args:
            patience: how long the other ranks wait, where torch's default may not do.
        """
        group = None if patience is None else self.group(patience)
        outcome: list[tuple[T | None, Exception | None] | None] = [None]
        if self.is_main:
            try:
                outcome = [(action(), None)]
            except Exception as failure:
                outcome = [(None, failure)]
        dist.broadcast_object_list(outcome, src=0, group=group)
        result, failure = outcome[0]
        if failure is not None:
            failure.known_to_all_ranks = True
            raise failure
        return result

    def on_each_machine(self, action: Callable[[], object], patience: timedelta) -> None:
        """Run `action` on the first rank of every machine; all ranks raise its error together.

        Args:
            patience: how long the other ranks wait.
        """
        group = self.group(patience)
        failure: Exception | None = None
        if self.rank % self.local_world_size == 0:
            try:
                action()
            except Exception as raised:
                failure = raised
        failures: list[Exception | None] = [None] * self.world_size
        dist.all_gather_object(failures, failure, group=group)
        for failure in failures:
            if failure is not None:
                failure.known_to_all_ranks = True
                raise failure


def launched_by() -> str | None:
    """What the torchrun that started this process is known by; None without torchrun.

    It is the same after torchrun has restarted its processes, and no other torchrun's.
    """
    # torchrun makes a folder of a new name each time that it is started, and a file's name in it
    # for each start of a process: FOLDER/attempt_1/0/error.json.
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return str(Path(file).parents[2]) if file else None


def restarts() -> tuple[int, int]:
    """How often torchrun has restarted the processes, and how often it may."""
    done = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    allowed = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return int(done), int(allowed)


def choose_device(asked: str, key: str) -> torch.device:
    """The device of this process; a GPU is made the current one.

    Args:
        asked: `auto`, `cpu` or `cuda`.
        key: where it was asked for, for the message.

    Raises:
        SettingsError: a GPU is asked for and there is none.
    """
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


@contextmanager
def processes(device: str) -> Iterator[Processes]:
    """The process group, gloo on CPU and NCCL on GPU, for the duration of the context.

    Args:
        device: `auto`, `cpu` or `cuda`.

    Raises:
        SettingsError: a GPU is asked for and there is none.
        TrainingStoppedError: on rank 0, other processes do not join.
    """
    chosen = choose_device(device, "run.device")
    # Checkpoints exchange CPU tensors also where training runs on GPUs.
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        store, rank, world_size = _rendezvous()
    else:
        store, rank, world_size = dist.HashStore(), 0, 1
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    try:
        yield Processes(
            rank=rank,
            world_size=world_size,
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))),
            device=chosen,
        )
        # Without it a process may abort at exit while another still uses a connection to it.
        dist.barrier()
    finally:
        dist.destroy_process_group()


def rank_environment(
    rank: int, count: int, store: Path, per_machine: int | None = None
) -> dict[str, str]:
    """What tells a process which rank it is, where the ranks share a file.

    Args:
        per_machine: ranks of one machine; all by default.
    """
    per_machine = per_machine or count
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % per_machine),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(per_machine),
        STORE_FILE: str(store),
    }


def start_ranks(count: int, command: Sequence[str], log: Path) -> int:
    """Run a command as the ranks of one run on this machine, until all end or one fails.

    Nothing outside of this machine can reach them, and other users of it cannot either: their store
    is a file, where that of torchrun listens on all addresses and asks for no password.

    Args:
        command: its standard input ends when this process does, in whatever way.
        log: gets the output of all.

    Returns:
        The exit status; where one fails the others are killed, and it is that of the failed one.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder, open_file(log, APPEND) as output:
        try:
            for rank in range(count):
                environment = dict(os.environ)
                if count > 1:
                    # As torchrun does; the ranks share the cores.
                    environment.setdefault("OMP_NUM_THREADS", "1")
                    environment |= rank_environment(rank, count, Path(folder) / "store")
                streams = {"stdin": subprocess.PIPE, "stdout": output, "stderr": output}
                ranks.append(subprocess.Popen(command, env=environment, **streams))
            statuses: list[int | None] = [None]
            # Not `wait`: Polars lets system calls go on after an interrupt.
            while None in statuses and not any(statuses):
                time.sleep(0.2)
                statuses = [rank.poll() for rank in ranks]
            # What a signal has killed did not lose a connection to another rank.
            return min(filter(None, statuses), default=0)
        finally:
            for rank in ranks:
                rank.kill()
                rank.stdin.close()
                rank.wait()


def _rendezvous() -> tuple[dist.Store, int, int]:
    """Store that the processes started together share, rank of this one, and their number.

    Rank and store are in the environment, as under torchrun.
    """
    if STORE_FILE in os.environ:
        store, rank, world_size = connection(), launched_rank(), launched_world_size()
        store.set_timeout(default_pg_timeout)
    else:
        store, rank, world_size = next(dist.rendezvous("env://"))
    # The store may be that of torchrun's agent, which outlives a restart: with the addresses of
    # processes that are gone (https://github.com/pytorch/pytorch/issues/135712).
    return dist.PrefixStore(agree_on_name(store, rank, world_size), store), rank, world_size


def connection() -> dist.Store:
    """One more connection to that store, for a thread that nothing else may wait on."""
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
        time.sleep(0.01 if missing else 0)
    return own


def _key(*parts: object) -> str:
    return "/".join(("stampede", "rendezvous", *map(str, parts)))
