"""Folders that tests read from."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"


def shared(relative: str) -> Path:
    """A file of the shared folder beside the checkout; skips the test where it is absent."""
    path = SHARED / relative
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    return path
