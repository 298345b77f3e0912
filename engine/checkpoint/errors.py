"""What is wrong with a checkpoint."""

from stampede.engine.errors import RunFolderError

# What to do about a damaged checkpoint of one's own run.
REMEDY = "delete it to use the one before"


class DamagedCheckpointError(RunFolderError):
    """A checkpoint whose files are not as they were written; another one may be whole."""
