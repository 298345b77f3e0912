"""`torchrun` whose workers are forked: none has to import what takes seconds to import.

Takes torchrun's arguments. The agent with its rendezvous, signals and restarts is torchrun's own.
"""

import contextlib
import multiprocessing
import os
import runpy
import subprocess
import sys
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.forked import START_METHOD


class _Forked:
    """What torchrun uses of a `subprocess.Popen`."""

    def __init__(self, command, environment):
        context = multiprocessing.get_context(START_METHOD)
        self._process = context.Process(target=_work, args=(command, environment))
        self._process.start()
        self.pid = self._process.pid

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired("a worker", timeout)


def _work(command, environment):
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    # What it says is to be there when it is killed.
    sys.stdout.reconfigure(line_buffering=True)
    # Without `python -u`.
    sys.argv = list(command[2:])
    runpy.run_path(sys.argv[0], run_name="__main__")


_close = SubprocessHandler.close


def _close_forked(handler, death_sig=None):
    # The fork server reaps a worker that ends before `poll` knows of it: it has no group to signal.
    with contextlib.suppress(ProcessLookupError):
        _close(handler, death_sig)


if __name__ == "__main__":
    SubprocessHandler._popen = lambda _, command, environment: _Forked(command, environment)
    SubprocessHandler.close = _close_forked
    run.main()
