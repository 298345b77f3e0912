"""What `stampede.optim` needs, and what it imports only where it is used."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
sys.modules["torchrec"] = sys.modules["fbgemm_gpu"] = None
import torch
from stampede.optim import CowClip, CowClipAdam
assert "triton" not in sys.modules, "Triton was imported"
table = torch.nn.Embedding(9, 4, sparse=True)
before = table.weight.detach().clone()
optimizer = CowClipAdam(table.parameters(), lr=0.1, clip=CowClip())
table(torch.tensor([1, 1])).sum().backward()
optimizer.step()
assert (table.weight != before).any()

from importlib import util
find = util.find_spec
util.find_spec = lambda name: None if name == "triton" else find(name)
sys.modules["triton"] = None
import stampede.optim, stampede.optim.triton, stampede.optim.lookup
assert not stampede.optim.triton.is_available()
"""


@pytest.mark.slow
def test_optim_runs_without_torchrec_and_triton():
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
