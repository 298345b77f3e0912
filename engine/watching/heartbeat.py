"""Where a rank is in its run, for the watchdog and for timing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

READING = "reading the next batch"
LOOKING_UP = "looking up"

# Collectives that run on a GPU's own stream, so that the host does not wait for them.
EXCHANGES = ("adding up the loss", "averaging gradients")

# The stages of a step; all others, such as evaluating, are outside.
PHASES = (
    READING,
    "sending ids",
    "between steps",
    LOOKING_UP,
    "computing",
    "adding up the loss",
    "updating tables",
    "averaging gradients",
    "updating dense layers",
    "updating waiting rows",
)


class Heartbeat:
    """What the training loop is doing; costs next to nothing.

    Attributes:
        beats: calls of `beat` so far. All ranks make the same calls in the same order, so a smaller
            number is an earlier place in the run.
        step, first_step: the newest step, and the first since this start of the run; 0 before it.
        stage: of the step, or between steps.
        slow: whether the stage may take hours without being a hang.
    """

    def __init__(self) -> None:
        self.beats = self.step = self.first_step = 0
        self.stage = "starting"
        self.slow = False
        self._listeners: tuple[Callable[[str], object], ...] = ()

    def beat(self, stage: str, step: int | None = None) -> None:
        """Begin a stage, such as `computing`, of the newest step or of a new one."""
        self.stage = stage
        if step is not None:
            self.step = step
            self.first_step = self.first_step or step
        # Last, so that a reader who sees the new beat also sees its stage.
        self.beats += 1
        for listener in self._listeners:
            listener(stage)

    @contextmanager
    def listening(self, listener: Callable[[str], object]) -> Iterator[None]:
        """While active, every beat calls `listener` with the stage that begins."""
        self._listeners = (*self._listeners, listener)
        try:
            yield
        finally:
            self._listeners = tuple(one for one in self._listeners if one != listener)

    @contextmanager
    def slowly(self, stage: str) -> Iterator[None]:
        """A stage whose time grows with the data, such as a save; see `beat`."""
        self.slow = True
        self.beat(stage)
        try:
            yield
        finally:
            # First, so that a reader who sees the end of the slow stage also sees this beat.
            self.beat(f"continuing after {stage}")
            self.slow = False
