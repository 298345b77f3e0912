"""Errors that end a run with a sentence instead of a traceback."""

_WHAT_TO_TRY = (
    "Try a lower optim.dense.lr or optim.embedding.lr, or a longer warm-up "
    "(optim.dense.schedule.warmup, optim.embedding.schedule.warmup); "
    "with checkpoint.resume=auto the run goes on from its newest checkpoint"
)


class RunFolderError(Exception):
    """A run folder or checkpoint that cannot be used as asked."""


class TrainingStoppedError(Exception):
    """Training cannot go on, for example because the loss is not finite. Agreed by all ranks.

    Args:
        message: why.
        step: number of the step that cannot be taken, where it is one.
    """

    known_to_all_ranks = True

    def __init__(self, message: str, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


class DivergedError(TrainingStoppedError):
    """A loss, a gradient or a weight that is not finite, or a loss that is far too high.

    Args:
        reason: what was found.
        step: as above.
    """

    def __init__(self, reason: str, step: int | None = None) -> None:
        super().__init__(reason, step)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason}. {_WHAT_TO_TRY}"


class DoesNotFitError(Exception):
    """A plan that needs more memory than the devices have."""

    known_to_all_ranks = True


class InterruptedRunError(Exception):
    """A run that was asked to stop by a signal, and did after a checkpoint. Agreed by all ranks.

    Args:
        message: what was saved and how to go on.
        signal: its number.
    """

    known_to_all_ranks = True

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal
