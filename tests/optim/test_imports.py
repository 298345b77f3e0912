"""What `stampede.optim` needs, and what it imports only where it is used."""

import subprocess
import sys

import pytest


def run(program):
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_plain_pytorch_needs_no_torchrec():
    program = """
import sys
sys.modules["torchrec"] = sys.modules["fbgemm_gpu"] = None
import torch
from stampede.optim import CowClip, CowClipAdam
table = torch.nn.Embedding(9, 4, sparse=True)
before = table.weight.detach().clone()
optimizer = CowClipAdam(table.parameters(), lr=0.1, clip=CowClip())
table(torch.tensor([1, 1])).sum().backward()
optimizer.step()
assert (table.weight != before).any()
"""
    run(program)


@pytest.mark.slow
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
    run(program)
