"""Triton is imported only where it is used."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("missing", [True, False])
def test_nobody_needs_triton(missing):
    program = f"""
import sys
if {missing}:
    from importlib import util
    find = util.find_spec
    util.find_spec = lambda name: None if name == "triton" else find(name)
    sys.modules["triton"] = None
import stampede.optim, stampede.optim.triton
import stampede.optim.lookup
assert not sys.modules.get("triton"), "Triton was imported"
if {missing}:
    assert not stampede.optim.triton.is_available()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
