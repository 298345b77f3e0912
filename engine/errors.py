"""Errors that end a run with a sentence instead of a traceback."""


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
