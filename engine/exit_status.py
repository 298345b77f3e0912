"""How a run ends: its exit status, and the sentence for what went wrong."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from stampede.data import DataError
from stampede.engine.compilation import could_not_compile
from stampede.engine.errors import (
    DoesNotFitError,
    InterruptedRunError,
    RunFolderError,
    TrainingStoppedError,
)
from stampede.engine.lack_of_memory import lacks_memory, what_was_asked
from stampede.engine.processes import launched_rank
from stampede.settings import SettingsError

MISTAKE, STOPPED, INTERRUPTED = 2, 1, 130
_LESS_MEMORY = (
    "try a smaller train.batch_size, evaluate.batch_size or model.dim, or more processes on other "
    "machines or GPUs; checkpoint.resume=auto continues from the newest checkpoint"
)
# Of processes that their watchdog has ended.
HUNG = 3


def exit_status(action: Callable[[], None]) -> int:
    """Do it as one of the processes of a run.

    Returns:
        0; 2 for a user's mistake, 1 for a failed run, 128 and the signal's number for one that was
        stopped: 143 by SIGTERM, 130 by SIGINT. A run that hangs ends with 3, from elsewhere.
    """
    try:
        action()
    except (SettingsError, DataError, RunFolderError) as mistake:
        return _complain(mistake, MISTAKE)
    except (TrainingStoppedError, DoesNotFitError) as stop:
        return _complain(stop, STOPPED)
    except InterruptedRunError as stop:
        if launched_rank() == 0:
            print(stop, flush=True)
        else:
            _let_rank_0_speak()
        return 128 + stop.signal
    except KeyboardInterrupt:
        print("stopped; checkpoint.resume=auto continues from the newest checkpoint")
        return INTERRUPTED
    except (MemoryError, RuntimeError, OSError) as failure:
        if lacks_memory(failure):
            lack = MemoryError(f"out of memory ({what_was_asked(failure)}); {_LESS_MEMORY}")
            # What rank 0 did for all of them fails on all.
            lack.known_to_all_ranks = getattr(failure, "known_to_all_ranks", False)
            return _complain(lack, STOPPED)
        if could_not_compile(failure):
            reason = next(iter(str(failure).strip().splitlines()), type(failure).__name__)
            asked = f"torch.compile failed ({reason}); write train.compile=none"
            return _complain(RuntimeError(asked), STOPPED)
        # gloo has no error of its own for a rank that is gone.
        if "gloo/transport" not in str(failure):
            raise
        reason = str(failure).strip().partition(". ")[0].rpartition("] ")[2]
        lost = f"the connection to another rank is lost ({reason}); see what that rank says"
        return _complain(RuntimeError(lost), STOPPED)
    return 0


def _complain(failure: Exception, status: int) -> int:
    if launched_rank() == 0:
        print(f"error: {failure}", file=sys.stderr, flush=True)
    elif not getattr(failure, "known_to_all_ranks", False):
        print(f"error on rank {launched_rank()}: {failure}", file=sys.stderr, flush=True)
    else:
        _let_rank_0_speak()
    return status


def _let_rank_0_speak() -> None:
    # torchrun ends all processes as soon as one does.
    time.sleep(2)
