"""The launcher in forked processes, which run it as often as asked and may be killed."""

import multiprocessing
import os
import runpy
import signal
import sys
import time
import traceback
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from support.forked import START_METHOD
from support.paths import ROOT
from support.soak.places import place_in, telling

_LAUNCH = ROOT / "launch.py"
_CONTEXT = multiprocessing.get_context(START_METHOD)
_OUTPUTS = ("stdout", "stderr")


class HangError(AssertionError):
    """A process that has not ended in time."""


@dataclass(frozen=True)
class Ended:
    """How the launcher ended.

    Attributes:
        status: exit status; of a process that a signal ended 128 and its number.
        said: on the console, both streams.
        seconds: it took.
        place: where it was last.
    """

    status: int
    said: str
    seconds: float
    place: object


class Worker:
    """A process that runs the launcher; a new one takes over when it has died.

    Args:
        folder: for what it says.
    """

    def __init__(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._process = None

    @property
    def pid(self):
        return self._process.pid

    @property
    def is_alive(self):
        return self._process is not None and self._process.is_alive()

    @property
    def place(self):
        """Where it is in its run, or was when it died."""
        return place_in(self._folder / "place")

    @property
    def said(self):
        paths = (self._folder / name for name in _OUTPUTS)
        return "".join(path.read_text() for path in paths if path.exists())

    def start(self, arguments, disturbance=nullcontext, environment=None):
        """Begin to run the launcher.

        Args:
            arguments: of the command line.
            disturbance: makes a context that the run happens in; importable.
            environment: variables besides.
        """
        if not self.is_alive:
            self._pipe, theirs = _CONTEXT.Pipe()
            self._process = _CONTEXT.Process(
                target=_serve, args=(theirs, self._folder), daemon=True
            )
            self._process.start()
            # Its end is then seen here.
            theirs.close()
        for name in ("place", *_OUTPUTS):
            (self._folder / name).unlink(missing_ok=True)
        self._since = time.monotonic()
        self._pipe.send((arguments, disturbance, environment or {}))

    def running(self):
        """Whether the launcher has not ended yet."""
        return not self._pipe.poll()

    def end(self, deadline):
        """Wait for the launcher's end.

        Raises:
            HangError: it is not there after so many seconds.
        """
        if not self._pipe.poll(deadline):
            place = self.place
            self.kill()
            raise HangError(f"still running after {deadline} s, {place}:\n{self.said}")
        try:
            status = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode
            status = 128 - code if code < 0 else code
        return Ended(status, self.said, time.monotonic() - self._since, self.place)

    def signal(self, number):
        os.kill(self.pid, number)

    def go_on(self):
        """After a stop."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self):
        """As `kill -9` does."""
        if self._process is not None:
            self._process.kill()
            self._process.join()


def stop(pid):
    """Stop a process and wait until all its threads stand still; False if it is gone."""
    try:
        os.kill(pid, signal.SIGSTOP)
        while True:
            with open(f"/proc/{pid}/stat") as file:
                state = file.read().rpartition(")")[2].split()[0]
            if state in "TtZX":
                return state in "Tt"
            time.sleep(0.0005)
    except (ProcessLookupError, FileNotFoundError):
        return False


def _serve(pipe, folder):
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    # Whoever started the tests may have had it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    while True:
        try:
            arguments, disturbance, environment = pipe.recv()
        except EOFError:
            return
        pipe.send(_launch(folder, arguments, disturbance, environment))


def _launch(folder, arguments, disturbance, environment):
    for number, name in enumerate(_OUTPUTS, 1):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    # What it has said is to be there when it is killed.
    sys.stdout.reconfigure(line_buffering=True)
    before = dict(os.environ)
    os.environ.update(environment)
    sys.argv = [str(_LAUNCH), *map(str, arguments)]
    status = 0
    try:
        with telling(folder / "place"), disturbance():
            runpy.run_path(str(_LAUNCH), run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        # Python would end the process, and with it all its connections.
        traceback.print_exc()
        sys.exit(1)
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        sys.stdout.flush()
        sys.stderr.flush()
    return status
