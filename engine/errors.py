"""Errors that end a run with a sentence instead of a traceback."""


class RunFolderError(Exception):
    """A run folder or checkpoint that cannot be used as asked."""


class TrainingStoppedError(Exception):
    """Training cannot go on, for example because the loss is not finite. Agreed by all ranks."""

    known_to_all_ranks = True


class DoesNotFitError(Exception):
    """A plan that needs more memory than the devices have."""

    known_to_all_ranks = True
