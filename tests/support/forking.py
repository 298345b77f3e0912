"""A program `forking.py`: what `python PROGRAM ...` or `python -m MODULE ...` does, but forked.

The process comes from the fork server of the tests, which has imported what takes seconds to
import. It has the streams, the environment and the network of the one that starts it.
"""

import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, reduction
from pathlib import Path

PROGRAM = (sys.executable, __file__)
_SERVER = "STAMPEDE_TESTS_FORK_SERVER"
# What `ip netns exec` and `unshare --uts` give to a process of its own.
_SPACES = ("net", "uts", "mnt")


def server_of_tests() -> dict[str, str]:
    """With this variable programs that this process starts find its fork server."""
    forkserver.ensure_running()
    return {_SERVER: forkserver._forkserver._forkserver_address}


class Forked:
    """A process as `subprocess.Popen` would start it.

    Args:
        arguments: what follows `python`.
        environment: all its variables.
        ends_too: when the process that starts it does, however that ends.
    """

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], *, ends_too: bool = False
    ):
        server = forkserver._forkserver
        server._forkserver_address = os.environ[_SERVER]
        # Whoever has it keeps the server alive, but that is for the tests to do.
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
        server.ensure_running = lambda: None
        given = list(arguments), dict(environment), os.getpid(), os.getcwd()
        # Its other end is closed with this process.
        here, self._open = os.pipe()
        self._process = multiprocessing.get_context("forkserver").Process(
            target=_work, args=(*given, ends_too, _Stream(here), _Stream(1), _Stream(2))
        )
        self._process.start()
        os.close(here)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit status, if it has ended."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, once it has ended."""
        self._process.join(timeout)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired("a forked process", timeout or 0)
        return self._process.exitcode


class _Stream:
    """The number of a stream of this process; where it is unpickled, the number there."""

    def __init__(self, number):
        self._number = number

    def __reduce__(self):
        return _number_here, (reduction.DupFd(self._number),)


def _number_here(stream):
    return stream.detach()


def _work(arguments, environment, starter, folder, ends_too, of_starter, *streams):
    for name in _SPACES:
        space = os.open(f"/proc/{starter}/ns/{name}", os.O_RDONLY)
        if not os.path.samestat(os.fstat(space), os.stat(f"/proc/self/ns/{name}")):
            assert ctypes.CDLL(None).setns(space, 0) == 0
        os.close(space)
    if ends_too:
        # A process with threads could not have changed its namespaces.
        threading.Thread(target=_end_with, args=(of_starter,), daemon=True).start()
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in enumerate(streams, 1):
        os.dup2(stream, number)
    # What it says is to be there when it is killed.
    sys.stdout.reconfigure(line_buffering=True)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def _end_with(pipe):
    os.read(pipe, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def _main():
    process = Forked(sys.argv[1:], os.environ, ends_too=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(process.pid, number))
    status = process.wait()
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    # There `_work` has a name that the fork server knows, too.
    from support import forking

    forking._main()
