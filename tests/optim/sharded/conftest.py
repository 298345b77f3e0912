"""A process group of one process for all tests of sharded tables."""

import pytest

from support.ranks import process_group


@pytest.fixture(scope="module", autouse=True)
def group():
    with process_group():
        yield
