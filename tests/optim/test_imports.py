"""What `stampede.optim` needs."""

import subprocess
import sys


def run(program):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True
    )


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
    done = run(program)
    assert done.returncode == 0, done.stderr
