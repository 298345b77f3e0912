"""A registry of networks for each test."""

import pytest

from stampede.models.registry import _NETWORKS


@pytest.fixture
def registered(monkeypatch):
    """Networks that are registered during the test are gone after it."""
    monkeypatch.setattr("stampede.models.registry._NETWORKS", dict(_NETWORKS))
