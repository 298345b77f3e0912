"""When a checkpoint within an epoch is due: `checkpoint.every_steps` and `every_minutes`."""

from __future__ import annotations

import time

from stampede.engine.config import CheckpointSection
from stampede.engine.watching.stop import Agreement


class CheckpointDue:
    """Asks after every step whether to save; rank 0's clock decides on the minutes."""

    def __init__(self, settings: CheckpointSection, agreement: Agreement) -> None:
        self._every, self._seconds = settings.every_steps, 60 * settings.every_minutes
        self._agreement = agreement
        self._saved = time.monotonic()

    def after(self, step: int) -> bool:
        """Whether a save is due, the same on all ranks; raises as `Agreement.after`."""
        by_clock = bool(self._seconds) and time.monotonic() - self._saved >= self._seconds
        return self._agreement.after(step, by_clock) or bool(
            self._every and step % self._every == 0
        )

    def saved(self) -> None:
        """Restart the clock after a save."""
        self._saved = time.monotonic()
