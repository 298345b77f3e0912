"""What is wrong with a checkpoint."""

from stampede.engine.errors import RunFolderError


class DamagedCheckpointError(RunFolderError):
    """A checkpoint whose files are not as they were written; another one may be whole."""
