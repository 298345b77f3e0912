"""The phases of training steps, and the time that each takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from stampede.engine.monitoring.clocks import Clock

READING = "reading the next batch"
LOOKING_UP = "looking up"

# Collectives that run on the stream of a GPU itself, so that nothing waits for them.
EXCHANGES = ("adding up the loss", "averaging gradients")

# Stages of the pulse that a step consists of; all others, such as evaluating, are outside.
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

# Steps that a GPU may be behind by; older ones are looked at, so that few events are held.
_HELD = 16


@dataclass
class StepTime:
    """Seconds of one step.

    Attributes:
        phases: by phase.
        outside: by other stages since the step before, which are no part of it.
        waited: in which the rank was held up by a collective; part of the phases.
    """

    phases: dict[str, float] = field(default_factory=dict)
    outside: dict[str, float] = field(default_factory=dict)
    waited: float = 0.0

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return sum(self.phases.values())


@dataclass
class _Step:
    """Marks of a step: where each stage begins, and between which there was a wait."""

    stages: list[tuple[str, Any]]
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    end: Any = None


class PhaseTimes:
    """Takes the time at every beat of the pulse, see `Pulse.listening`.

    A step begins where the one before has ended: with its batch, which is read and sent while the
    one before waits to be computed. What was begun of a step that diverged counts for the next one.

    Args:
        clock: of the device.
        exchanges: phases that are collectives and nothing else; all their time counts as waited.
    """

    def __init__(self, clock: Clock, exchanges: Collection[str] = ()) -> None:
        self._clock = clock
        self._exchanges = exchanges
        self._stage = "starting"
        self._step = _Step([(self._stage, clock.mark())])
        self._ended: deque[_Step] = deque()
        self._times: list[StepTime] = []

    def begin(self, stage: str) -> None:
        """A stage begins, and the one before ends."""
        # An evaluation beats at each of its batches.
        if stage == self._stage:
            return
        self._stage = stage
        self._step.stages.append((stage, self._clock.mark()))

    def mark(self) -> Any:
        """Where a wait begins."""
        return self._clock.mark()

    def waited(self, since: Any) -> None:
        """A wait in a collective ends."""
        if self._stage in PHASES and self._stage not in self._exchanges:
            self._step.waits.append((since, self._clock.mark()))

    def end_step(self) -> None:
        """A step ends, and the next begins in the same stage."""
        self._step.end = self._clock.mark()
        self._ended.append(self._step)
        self._step = _Step([(self._stage, self._step.end)])
        while len(self._ended) > _HELD and self._clock.is_settled(self._ended[0].end):
            self._take_oldest()

    def take(self) -> list[StepTime]:
        """The steps that have ended since the last call; a GPU is waited for."""
        if self._ended:
            self._clock.settle(self._ended[-1].end)
        while self._ended:
            self._take_oldest()
        taken, self._times = self._times, []
        return taken

    def _take_oldest(self) -> None:
        step = self._ended.popleft()
        found = StepTime()
        ends = [mark for _, mark in step.stages[1:]] + [step.end]
        for (stage, begin), end in zip(step.stages, ends, strict=True):
            into = found.phases if stage in PHASES else found.outside
            into[stage] = into.get(stage, 0.0) + self._clock.seconds(begin, end)
        found.waited = sum(self._clock.seconds(*wait) for wait in step.waits)
        found.waited += sum(found.phases.get(phase, 0.0) for phase in self._exchanges)
        self._times.append(found)
