"""Fixtures of several files."""

import pytest

from stampede.models.registry import _NETWORKS


@pytest.fixture
def registered(monkeypatch):
    """Networks registered during a test are gone after it."""
    monkeypatch.setattr("stampede.models.registry._NETWORKS", dict(_NETWORKS))
