"""Fixtures of several files."""

from functools import cache
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


@pytest.fixture(scope="session")
def one_registry():
    """torch.onnx reads its 500 translations once, not in every export, where it takes longest.

    Likewise torch.export the list of its operators.
    """
    from torch.export import decomp_utils, exported_program
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    made = cache(ONNXRegistry.from_torchlib)
    operators = cache(decomp_utils._collect_all_valid_cia_ops)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(made))
        for module in (decomp_utils, exported_program):
            patch.setattr(module, "_collect_all_valid_cia_ops", operators)
        yield
