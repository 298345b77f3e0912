# pyright: basic
"""How a process of a run ends: its exit status, and a sentence for what went wrong."""

from __future__ import annotations

import errno
import os
import resource
import sys
import time
from collections.abc import Callable

from stampede.data.errors import DataError
from stampede.engine.errors import (
    DoesNotFitError,
    InterruptedRunError,
    RunFolderError,
    TrainingStoppedError,
)
from stampede.engine.start_up import launched_rank
from stampede.settings import SettingsError, printable
from stampede.stores import StoreError

# Exit statuses: a user's mistake, a failed run, Ctrl-C, a hanging run (`hang.py`).
MISTAKE, STOPPED, INTERRUPTED, HUNG = 2, 1, 130, 3

_NEED_LESS_MEMORY = (
    "try a smaller train.batch_size, evaluate.batch_size or model.dim, or more processes on other "
    "machines or GPUs; checkpoint.resume=auto continues from the newest checkpoint"
)


def exit_status(action: Callable[[], None]) -> int:
    """Run `action` in a process of a run, and turn errors into sentences.

    Returns:
        0; 2 for a user's mistake; 1 for a failed run; 128 plus the signal's number for a run that
        was stopped: 143 by SIGTERM, 130 by SIGINT.
    """
    try:
        action()
    except (TrainingStoppedError, DoesNotFitError) as stop:
        return _complain(stop, STOPPED)
    except (SettingsError, DataError, RunFolderError, StoreError) as mistake:
        return _complain(mistake, MISTAKE)
    except InterruptedRunError as stop:
        if launched_rank() == 0:
            print(stop, flush=True)
        else:
            _let_rank_0_speak()
        return 128 + stop.signal
    except KeyboardInterrupt:
        # Training saves a checkpoint when it is asked to stop, so this was before or after it.
        print(
            "stopped; rerun with checkpoint.resume=auto to continue from the newest checkpoint, "
            "or from scratch if there is none"
        )
        return INTERRUPTED
    except (MemoryError, RuntimeError, OSError) as failure:
        sentence = _sentence_of(failure)
        if sentence is None:
            raise
        return _complain(failure, STOPPED, sentence)
    return 0


def _sentence_of(failure: Exception) -> str | None:
    """A sentence for an error of torch or the system; None for one that needs its traceback."""
    if lacks_memory(failure):
        return f"out of memory ({what_was_asked(failure)}); {_NEED_LESS_MEMORY}"
    # It is slow to import; if it failed, it has been imported.
    compilers = sys.modules.get("torch._dynamo.exc")
    if compilers is not None and isinstance(failure, compilers.BackendCompilerFailed):
        reason = next(iter(str(failure).strip().splitlines()), type(failure).__name__)
        return f"torch.compile failed ({reason}); write train.compile=none"
    if os.strerror(errno.EMFILE) in str(failure):
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"this process may open only {most:,} files; write ulimit -n 65536 before the command"
        )
    if is_lost_connection(str(failure)):
        reason = str(failure).strip().partition(". ")[0].rpartition("] ")[2]
        return f"the connection to another rank is lost ({reason}); read that rank's output"
    return None


def is_lost_connection(reason: str) -> bool:
    """Whether the text of an error is gloo's for a lost rank, which has no type of its own."""
    return "gloo/transport" in reason


def lacks_memory(failure: BaseException) -> bool:
    """Whether an error says that main or GPU memory has run out."""
    if isinstance(failure, OSError):
        return failure.errno == errno.ENOMEM
    # torch, its libraries and C++ share no type for it.
    said = ("DefaultCPUAllocator", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "std::bad_alloc")
    return isinstance(failure, MemoryError) or (
        isinstance(failure, RuntimeError) and any(words in str(failure) for words in said)
    )


def what_was_asked(failure: BaseException) -> str:
    """An out-of-memory error in one line."""
    lines = str(failure).strip().splitlines() or [type(failure).__name__]
    # Without the place in torch's sources.
    return lines[0].rpartition("err == 0. ")[2][:300]


def _complain(failure: Exception, status: int, sentence: str = "") -> int:
    said = printable(sentence or str(failure))
    # All ranks raise the errors of work that rank 0 did for them; one prints them.
    if launched_rank() == 0:
        print(f"error: {said}", file=sys.stderr, flush=True)
    elif not getattr(failure, "known_to_all_ranks", False):
        print(f"error on rank {launched_rank()}: {said}", file=sys.stderr, flush=True)
    else:
        _let_rank_0_speak()
    return status


def _let_rank_0_speak() -> None:
    # torchrun ends all processes as soon as one ends.
    time.sleep(2)
