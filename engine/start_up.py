"""What a command sets before torch is imported, how its process ends, and torchrun's ranks."""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

# From malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4

_SETTINGS_OF_GLIBC = (
    "GLIBC_TUNABLES",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
)

# The lowest level that each logger shows, from the root down.
_LIBRARIES = (
    "torchrec",
    "fbgemm_gpu",
    "torch",
    "torch.fx._symbolic_trace",
    "torch.onnx._internal.exporter",
)
# Whether this process runs one command, and nothing else.
_is_command = False

_LEVELS = {**dict.fromkeys((None, *_LIBRARIES), logging.ERROR), "stampede": logging.WARNING}


def as_process(command: Callable[[], int]) -> NoReturn:
    """Run a command as all that this process does, and end with the exit status that it returns.

    Threads are waited for, exit functions of what the command imports run, and output is flushed.
    But objects are not freed one by one, which takes libraries longer than to import torch. A file
    that was never closed may so lose its last lines.
    """
    global _is_command
    _is_command, status = True, 1

    def end() -> None:
        logging.shutdown()
        lost = _flushed()
        if status == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(lost or status)

    # Exit functions run in reverse order, so this one comes last.
    atexit.register(end)
    try:
        status = command()
    except SystemExit as asked:
        status = 0 if asked.code is None else asked.code if isinstance(asked.code, int) else 1
        raise
    except KeyboardInterrupt:
        # The shell is to see that the process was interrupted.
        status = -signal.SIGINT
        raise
    sys.exit(status)


def _flushed() -> int:
    """Write what is left of the output; returns 0, or the exit status if it is lost."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None or stream.closed:
            continue
        try:
            stream.flush()
        except BrokenPipeError:
            # As after SIGPIPE: the reader, such as `head`, has closed the pipe.
            return 141
        except OSError as failure:
            with suppress(OSError):
                print(f"error: output is lost ({failure.strerror})", file=sys.stderr, flush=True)
            # Python's own.
            return 120
    return 0


@contextmanager
def importing() -> Iterator[None]:
    """Import libraries without garbage collections, which take a fifth of the time and find none.

    In a process of a command, later collections skip all that is there then.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # In a user's process, the user's objects would stay, too.
        if _is_command:
            gc.freeze()
        if was_on:
            gc.enable()


def quiet_libraries() -> None:
    """Show only errors of torch, torchrec and fbgemm; users cannot act on the rest."""
    for name, level in _LEVELS.items():
        logging.getLogger(name).setLevel(level)
    warnings.filterwarnings("ignore")
    show = threading.excepthook

    def show_others(failure: threading.ExceptHookArgs) -> None:
        # A failure in TensorBoard's thread is raised again when events are written.
        if type(failure.thread).__name__ != "_AsyncWriterThread":
            show(failure)

    threading.excepthook = show_others


@contextmanager
def libraries_quiet() -> Iterator[None]:
    """`quiet_libraries` for the duration of the context, in a process such as a notebook's."""
    before = {name: logging.getLogger(name).level for name in _LEVELS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, level in _LEVELS.items():
            # The user may want to see more of stampede.
            chosen = before[name] or level if name == "stampede" else max(level, before[name])
            logging.getLogger(name).setLevel(chosen)
        try:
            yield
        finally:
            for name, level in before.items():
                logging.getLogger(name).setLevel(level)


def before_torch() -> None:
    """What every command sets up before it imports torch; settings in the environment win."""
    quiet_libraries()
    sleep_while_waiting()
    keep_freed_memory()
    stay_on_this_machine()


def sleep_while_waiting() -> None:
    """Let OpenMP's threads wait for each other awake for a short while only, then asleep.

    By default they stay awake much longer. On a busy machine the thread that waits then keeps a
    core from the one it waits for: `benchmarks/small_logs.py`.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        # Read by GCC's OpenMP, which torch brings for Linux.
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks for the next step, and torch take big ones in huge pages.

    By default glibc returns big blocks to the system and gets them back page by page, zeroed: a
    tenth of a step at batch 65,536. The process keeps what it has freed, see
    `give_back_freed_memory`. Settings in the environment win; C libraries other than glibc are left
    alone.
    """
    # torch reads this at its first allocation.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    mallopt = _of_glibc("mallopt")
    if mallopt is not None:
        # -1: never return memory; 0: no separate mappings, which free would return.
        mallopt(_TRIM_THRESHOLD, -1)
        mallopt(_MMAP_MAX, 0)


def give_back_freed_memory() -> None:
    """Return freed memory that lies unused between used blocks.

    `keep_freed_memory` lets it grow for some hundred steps where a thread reads batches from a
    disk.
    """
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_glibc(function: str) -> Callable[..., int] | None:
    """A function of glibc's allocator; None where it is another one, or the user's to set."""
    if any(name in os.environ for name in _SETTINGS_OF_GLIBC):
        return None
    return getattr(ctypes.CDLL(None), function, None)


def same_products() -> None:
    """Let MKL's products have the same bits wherever their factors lie in memory.

    Where a tile or batch begins depends on the number of ranks and on the rows before it, and
    vectors go by the addresses. MKL reads this before the first product, when TorchRec is
    imported; a setting in the environment wins.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def stay_on_this_machine() -> None:
    """Let gloo listen on the loopback device only if all ranks are on one machine."""
    if launched_world_size() == int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def launched_rank() -> int:
    """Rank that `torchrun` gave this process; 0 without it."""
    return int(os.environ.get("RANK", "0"))


def launched_world_size() -> int:
    """Number of processes that `torchrun` started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_by() -> str | None:
    """An identifier of the torchrun that started this process, kept in restarts, or None."""
    # Each torchrun makes a folder with a new name: FOLDER/attempt_1/0/error.json.
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return str(Path(file).parents[2]) if file else None


def restarts() -> int:
    """How often torchrun has restarted the processes."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
