"""Kernels as the tests of this folder ask for them."""

from importlib import import_module

import pytest

from stampede.optim import native
from support.lookups import small_blocks


@pytest.fixture(scope="session")
def cpp_kernels():
    """The C++ kernels are there."""
    assert native.available()


@pytest.fixture(scope="module")
def small_triton_blocks():
    """Several programs of the Triton kernels for a handful of rows."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("steps", "sum_runs"):
            module = import_module(f"stampede.optim.triton.{name}")
            patch.setattr(module, "block_sizes", lambda dim, _: small_blocks(dim))
        yield
