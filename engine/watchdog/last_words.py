"""What a process leaves behind that ends because the run hangs."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

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
    status: int, sentence: str, path: Path, is_first: Callable[[], bool], grace: float
) -> None:
    """Write the stacks of all threads, say why, and end this process without cleaning up.

    Whatever blocks on the way, such as a disk that does not answer, is given up soon.

    Args:
        status: exit status.
        sentence: why.
        path: file for the sentence and the stacks.
        is_first: whether this process is the one to say it.
        grace: seconds that other processes have for the same.
    """
    within(5.0, lambda: _write_stacks(path, sentence))
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


def within(seconds: float, action: Callable[[], object]) -> None:
    """Do what may never end, but wait for it so long only."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(seconds)
