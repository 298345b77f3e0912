"""Checkpoints of hosts without a shared folder: rank 0's host has them whole.

The files go through the ranks' own process group, piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from stampede import stores
from stampede.data.prepared.manifest import MANIFEST
from stampede.engine.processes import Processes, together
from stampede.files import FileEntry, remove, sync

# Rank 0 holds one of each rank in memory.
_PIECE = 4 << 20


def gather_files(
    folder: Path, entries: Sequence[Sequence[FileEntry]], processes: Processes
) -> None:
    """Bring the files of other hosts into the folder of rank 0's; all ranks must call it.

    Args:
        folder: of this rank's host.
        entries: of the files that each rank has written.
    """
    group = processes.checkpoint_group
    here = processes.local_world_size
    sent = [[] if rank < here else of_rank for rank, of_rank in enumerate(entries)]
    rounds = max(sum(max(1, -(-file.bytes // _PIECE)) for file in files) for files in sent)
    pieces = chain.from_iterable(_pieces(folder, file.name) for file in sent[processes.rank])
    got: list[Any] = [None] * processes.world_size
    with _failing_together(group) as attempt:
        for _ in range(rounds):
            piece = attempt(lambda: next(pieces, None))
            dist.gather_object(piece, got if processes.is_main else None, group=group)
            if processes.is_main:
                for one in filter(None, got):
                    attempt(partial(_append, folder, *one))
        if processes.is_main:
            for file in chain.from_iterable(sent):
                attempt(partial(sync, folder / file.name))


@contextmanager
def on_every_host(folder: Path | None, processes: Processes) -> Iterator[Path | None]:
    """A folder of rank 0's host with a manifest; hosts that lack it have a copy in the context.

    All ranks must enter it together.
    """
    if folder is None or processes.world_size == processes.local_world_size:
        yield folder
        return
    group, file = processes.group, folder / MANIFEST
    manifest = processes.on_main(file.read_bytes)
    lacks = not (file.is_file() and file.read_bytes() == manifest)
    if not any(together(lambda: lacks, group)):
        yield folder
        return
    # Hosts may share the disk.
    copy = stores.scratch(f"{processes.on_main(lambda: uuid4().hex)}_{processes.host_number}")
    names = processes.on_main(lambda: [str(one.relative_to(folder)) for one in _files(folder)])
    writes = lacks and processes.is_first_of_host
    pieces = chain.from_iterable(_pieces(folder, name) for name in names)
    try:
        with _failing_together(group) as attempt:
            while True:
                sent = [attempt(lambda: next(pieces, None)) if processes.is_main else None]
                dist.broadcast_object_list(sent, src=0, group=group)
                if sent[0] is None:
                    break
                if writes:
                    attempt(partial(_append, copy, *sent[0]))
        yield copy if lacks else folder
        # Others of this host may still read it.
        together(lambda: None, group)
    finally:
        if writes:
            remove(copy)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _pieces(folder: Path, name: str) -> Iterator[tuple[str, bytes]]:
    """A file's content, each piece with the file's name; an empty file is an empty piece."""
    with (folder / name).open("rb") as file:
        piece = file.read(_PIECE)
        yield name, piece
        while piece := file.read(_PIECE):
            yield name, piece


def _append(folder: Path, name: str, content: bytes) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("ab") as file:
        file.write(content)


@contextmanager
def _failing_together(group: dist.ProcessGroup | None) -> Iterator[Callable[..., Any]]:
    """Yield what calls a function until one fails; at the end all ranks raise that failure."""
    failures: list[Exception] = []

    def attempt(action: Callable[[], Any]) -> Any:
        if failures:
            return None
        try:
            return action()
        except OSError as failure:
            failures.append(failure)
            return None

    yield attempt

    def tell() -> None:
        if failures:
            raise failures[0]

    together(tell, group)
