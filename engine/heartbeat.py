"""Where a rank is in its run, for its watchdog and for whoever takes its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

READING = "reading the next batch"
LOOKING_UP = "looking up"

# Collectives that run on the stream of a GPU itself, so that nothing waits for them.
EXCHANGES = ("adding up the loss", "averaging gradients")

# Stages of the heartbeat that a step consists of; all others, such as evaluating, are outside.
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
    """What the training loop did last; as good as free to keep up to date.

    Attributes:
        beats: calls of `beat` so far. All ranks make the same ones in the same order, so that a
            smaller number is an earlier place in the run.
        step: number of the step that is being taken or was taken last; 0 before.
        first_step: that of the first one of this start of the run.
        stage: of that step, or what is done between steps.
        slow: whether the stage may last for hours and yet be no hang.
    """

    def __init__(self) -> None:
        self.beats = 0
        self.step = 0
        self.first_step = 0
        self.stage = "starting"
        self.slow = False
        self._listeners: tuple[Callable[[str], object], ...] = ()

    def beat(self, stage: str, step: int | None = None) -> None:
        """Begin with a stage.

        Args:
            stage: a participle, such as `computing`.
            step: its step; default: the one before's.
        """
        self.stage = stage
        if step is not None:
            self.step = step
            self.first_step = self.first_step or step
        # Last, so that whoever sees the beat sees where it was.
        self.beats += 1
        for listener in self._listeners:
            listener(stage)

    @contextmanager
    def listening(self, listener: Callable[[str], object]) -> Iterator[None]:
        """Within it `listener` is called at every beat with the stage that begins."""
        self._listeners = (*self._listeners, listener)
        try:
            yield
        finally:
            self._listeners = tuple(one for one in self._listeners if one != listener)

    @contextmanager
    def slowly(self, stage: str) -> Iterator[None]:
        """A stage that takes as long as the data are large, such as a save.

        Args:
            stage: see `beat`.
        """
        self.slow = True
        self.beat(stage)
        try:
            yield
        finally:
            # First, so that whoever sees the end of the stage sees this beat.
            self.beat(f"going on after {stage}")
            self.slow = False
