"""Where a rank is in its run, for its watchdog."""

from __future__ import annotations


class Pulse:
    """What the training loop did last; as good as free to keep up to date.

    Attributes:
        beats: calls of `beat` so far. All ranks make the same ones in the same order, so that a
            smaller number is an earlier place in the run.
        step: number of the step that is being taken or was taken last; 0 before.
        stage: of that step, or what is done between steps.
    """

    def __init__(self) -> None:
        self.beats = 0
        self.step = 0
        self.stage = "starting"

    def beat(self, stage: str, step: int | None = None) -> None:
        """Begin with a stage.

        Args:
            stage: a participle, such as `computing`.
            step: its step; default: the one before's.
        """
        self.stage = stage
        if step is not None:
            self.step = step
        # Last, so that whoever sees the beat sees where it was.
        self.beats += 1
