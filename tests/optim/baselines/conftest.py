"""A process group and a seed for all tests of baselines."""

import pytest
import torch

from stampede.engine.processes import processes


@pytest.fixture(scope="module", autouse=True)
def process_group():
    with processes("cpu") as here:
        yield here


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
