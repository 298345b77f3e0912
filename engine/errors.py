# pyright: basic
"""The errors of a run; `exit_status.py` turns each into a sentence."""

from __future__ import annotations

from stampede.settings import SettingsError, UserError

_TRY_LOWER_RATES = (
    "Try a lower optim.dense.lr or optim.embedding.lr, or a longer warm-up "
    "(optim.dense.schedule.warmup, optim.embedding.schedule.warmup); with checkpoint.resume=auto "
    "the run continues from its newest checkpoint"
)


class RunFolderError(UserError):
    """A run folder or checkpoint that cannot be used as asked."""


class _SharedError(UserError):
    """An error that all ranks raise; one of them prints it."""

    known_to_all_ranks = True


class TrainingStoppedError(_SharedError):
    """Training cannot continue, perhaps because of a step."""

    def __init__(self, message: str, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


class DivergedError(TrainingStoppedError):
    """A loss, gradient or weight is not finite, or the loss is far too high."""

    def __init__(self, reason: str, step: int | None = None) -> None:
        super().__init__(reason, step)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason}. {_TRY_LOWER_RATES}"


class NotPublishedError(TrainingStoppedError):
    """Results are whole on this machine, and could not be copied to a store."""

    REMEDY = ". Mend that, and continue with checkpoint.resume=auto on this machine"

    def __str__(self) -> str:
        return f"{self.args[0]}{self.REMEDY}"


class DoesNotFitError(SettingsError):
    """A plan needs more memory than the devices have."""


class InterruptedRunError(_SharedError):
    """A signal, of this number, stopped the run, after a checkpoint."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal
