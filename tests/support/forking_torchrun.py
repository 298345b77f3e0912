"""`torchrun` whose workers are forked: none has to import what takes seconds to import.

Takes torchrun's arguments. The agent with its rendezvous, signals and restarts is torchrun's own.
"""

import contextlib
import sys
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.forking import Forked

_close = SubprocessHandler.close


def _close_forked(handler, death_sig=None):
    # The fork server reaps a worker that ends before `poll` knows of it: it has no group to signal.
    with contextlib.suppress(ProcessLookupError):
        _close(handler, death_sig)


if __name__ == "__main__":
    # Without `python -u`.
    SubprocessHandler._popen = lambda _, command, environment: Forked(command[2:], environment)
    SubprocessHandler.close = _close_forked
    run.main()
