"""Fixtures of several files."""

from unittest import mock

import pytest

from stampede.models.registry import _NETWORKS
from stampede.optim import registry


@pytest.fixture
def registered(monkeypatch):
    """Networks, rules and clips registered during a test are gone after it."""
    monkeypatch.setattr("stampede.models.registry._NETWORKS", dict(_NETWORKS))
    with mock.patch.dict(registry.RULES), mock.patch.dict(registry.CLIPS):
        yield
