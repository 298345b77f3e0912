"""What a process leaves behind that ends because the run hangs."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from stampede.engine.monitoring.flight_recorder import (
    dump_file,
    last_collectives,
    recorded,
    write_dump,
)
from stampede.engine.restarts import restarts


def stack_file(folder: Path, rank: int) -> Path:
    """File in a run's folder with the stacks of a rank's threads when the run hung."""
    return folder / f"hang_rank_{rank}.txt"


def what_happens_now(status: int) -> str:
    """How the run goes on once its processes have ended, as part of a sentence."""
    ends = f"its processes end with status {status}"
    done, allowed = restarts()
    if done < allowed:
        return (
            f"{ends}, and torchrun starts them again from the newest checkpoint (restart "
            f"{done + 1} of {allowed})"
        )
    return f"{ends}; checkpoint.resume=auto continues from the newest checkpoint"


def end_process(
    status: int,
    sentence: str,
    where: str,
    folder: Path,
    rank: int,
    is_first: Callable[[], bool],
    grace: float,
) -> None:
    """Write what all threads do and the last collectives, say why, and end without cleaning up.

    Whatever blocks on the way, such as a disk that does not answer, is given up soon.

    Args:
        status: exit status.
        sentence: why.
        where: what this rank was doing.
        folder: of the run, for `hang_rank_0.txt` and so on, and the dump of the flight recorder.
        rank: this one.
        is_first: whether this process is the one to say it.
        grace: seconds that other processes have for the same.
    """
    path = stack_file(folder, rank)
    within(5.0, lambda: _write_stacks(path, f"{sentence}\n\nrank {rank} at {where}"))
    within(5.0, lambda: _write_collectives(path, dump_file(folder, rank)))
    if is_first():
        # Not through `sys.stderr`, whose lock the main thread may hold.
        within(5.0, lambda: os.write(2, f"\nerror: {sentence}\n".encode()))
    within(1.0, sys.stdout.flush)
    time.sleep(grace)
    os._exit(status)


def _write_stacks(path: Path, sentence: str) -> None:
    try:
        with path.open("w", encoding="utf-8") as file:
            file.write(f"{sentence}\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
    except OSError as failure:
        text = f"\n{path}: stacks cannot be written ({failure.strerror or failure})\n"
        os.write(2, text.encode())


def _write_collectives(path: Path, dump_path: Path) -> None:
    dump = None
    try:
        dump = recorded()
        told = last_collectives(dump)
    # Whatever it is that this version of torch has otherwise.
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as failure:
        told = f"torch's flight recorder cannot be read ({failure!r})"
    with suppress(OSError), path.open("a", encoding="utf-8") as file:
        file.write(f"\n{told}\n")
    if dump is not None:
        with suppress(OSError):
            write_dump(dump_path, dump)


def within(seconds: float, action: Callable[[], object]) -> None:
    """Do what may never end, but wait for it so long only."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(seconds)
