"""Kinds of faults: how each is injected, what the user then sees, and how it is mended.

A kind is a context: it injects the fault into a `Case`, gives how the launcher is to meet it, and
mends it at its end.
"""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

KINDS = {}


@dataclass(frozen=True)
class Meeting:
    """How the launcher meets a fault.

    Attributes:
        says: pattern of what it must say.
        overrides: of the configuration.
        disturbance: of the process of a rank.
        rank: that one.
        meanwhile: is called while it runs; what it returns is how the launcher that met the fault
            has ended, if it is another one.
    """

    says: str
    overrides: tuple = ()
    disturbance: object = nullcontext
    rank: int = 0
    meanwhile: object = None


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        inject: the context.
        times: how often the soak injects it.
        status: that the launcher must end with.
        begun: whether the run has been begun before, see `Case`.
        ranks: processes.
        traceback: whether one is as it should be: nobody foresees a mistake in the program.
        loses: whether steps may have to be done again.
        needs_disk: whether the process needs a disk of its own.
    """

    inject: object
    times: int
    status: int
    begun: bool = False
    ranks: int = 1
    traceback: bool = False
    loses: bool = True
    needs_disk: bool = False


def kind(name, times, status, **more):
    """Register a context as a kind, see `Kind`."""

    def register(inject):
        KINDS[name] = Kind(contextmanager(inject), times, status, **more)
        return inject

    return register
