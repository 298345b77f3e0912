"""Errors in the user's data."""

from __future__ import annotations

from stampede.settings import UserError


class DataError(UserError):
    """A data file that cannot be used; the message names the file, the place and the remedy."""


class NoSuchFileError(DataError):
    """A name or glob of a log that matches no file."""


class UnfinishedFileError(DataError):
    """A data file that grew while it was read."""
