"""The kernels are there in all tests of this folder."""

import pytest
import torch

from stampede.models import cpu


@pytest.fixture(autouse=True, scope="session")
def _compiled():
    assert cpu.computing_dtype(torch.zeros(1)) == torch.float32
