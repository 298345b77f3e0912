"""A guard around code that is given hostile input: no execution, no escape, no hang, no blow-up."""

import faulthandler
import re
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

# Wall time of one case, in seconds; a case takes milliseconds, but the machine may be very busy.
HANG = 1200

# What one case may take of memory, in bytes.
MEMORY = 400 << 20

# A sentence for a person.
_LONGEST_SENTENCE = 20_000

# Audit events of programs started, connections made and pickles loaded.
_FORBIDDEN = re.compile(
    r"(os\.(system|exec|posix_spawn|spawn|fork|forkpty|startfile)|subprocess\.Popen|pty\.spawn"
    r"|socket\.(connect|bind|getaddrinfo)|pickle\.find_class)$"
)


class _Watch:
    """What the guarded code does; the hook itself can never be removed from a process."""

    installed = False
    active = False
    sandbox = ""
    seen: ClassVar[list[str]] = []

    @classmethod
    def hook(cls, event, arguments):
        if not cls.active:
            return
        if _FORBIDDEN.match(event):
            cls.seen.append(f"{event} {arguments!r:.200}")
        elif event == "open" and isinstance(arguments[0], str | bytes):
            path, mode, flags = arguments
            path = path.decode() if isinstance(path, bytes) else path
            writes = (isinstance(mode, str) and set(mode) & set("wax+")) or (flags or 0) & 3
            if "canary" in path or (writes and not path.startswith((cls.sandbox, "/dev/null"))):
                cls.seen.append(f"open {path:.200} {mode}")


@contextmanager
def guarded(sandbox: Path, *expected: type[Exception], hang: float = HANG, memory: int = MEMORY):
    """Fail where the code within does more than to end well or with one of the expected errors.

    Gives a list that gets the sentence of the error. Whatever has `canary` in its path must not be
    opened, and nothing outside of the sandbox be written.
    """
    if not _Watch.installed:
        sys.addaudithook(_Watch.hook)
        _Watch.installed = True
    sentences: list[str] = []
    before = _peak(reset=True)
    _Watch.sandbox, _Watch.seen = str(sandbox), []
    with _deadline(hang):
        _Watch.active = True
        try:
            yield sentences
        except expected as failure:
            sentences.append(str(failure))
        finally:
            _Watch.active = False
    assert not _Watch.seen, _Watch.seen
    grown = _peak() - before
    assert grown < memory, f"{grown >> 20} MB of memory"
    assert all(0 < len(said) < _LONGEST_SENTENCE for said in sentences), sentences


@contextmanager
def _deadline(seconds):
    def stop(*_):
        raise AssertionError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    # Where no Python code gets a turn any more.
    faulthandler.dump_traceback_later(2 * seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _peak(reset=False) -> int:
    """Largest resident size of this process since it was last reset, in bytes."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) << 10
