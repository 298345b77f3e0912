"""Sentences for files of a sweep that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stampede.engine.errors import RunFolderError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Something that writes a file or a folder.

    Raises:
        RunFolderError: it cannot be written.
    """
    try:
        yield
    except OSError as failure:
        raise RunFolderError(
            f"{path}: cannot be written ({failure.strerror or failure}); make room and give the "
            "same command again, or write another --out"
        ) from None


@contextmanager
def reading(path: Path, instead: str) -> Iterator[None]:
    """Something that reads what a sweep or a run wrote.

    Args:
        instead: what to do where the file is damaged.

    Raises:
        RunFolderError: it is damaged or absent.
    """
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError) as failure:
        lacks = isinstance(failure, KeyError)
        said = f"no {failure}" if lacks else str(failure) or type(failure).__name__
        raise RunFolderError(f"{path}: is damaged ({said.splitlines()[0]}); {instead}") from None
