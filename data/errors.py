"""What is wrong with a user's data."""


class DataError(Exception):
    """A data file that cannot be used; the message names the file, the place and the remedy."""
