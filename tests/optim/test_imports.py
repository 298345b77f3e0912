"""What `stampede.optim` needs."""

import subprocess
import sys

import pytest


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


@pytest.mark.parametrize("first", ["stampede.optim", "torchrec"])
def test_whoever_forgets_our_sharders_is_told_so_in_any_order_of_imports(first):
    program = f"""
import {first}
import torch, torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from stampede.optim import CowClipAdam
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
config = EmbeddingBagConfig(name="a", embedding_dim=8, num_embeddings=9, feature_names=["f"])
ebc = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
apply_optimizer_in_backward(CowClipAdam, ebc.parameters(), {{}})
DistributedModelParallel(ebc, device=torch.device("cpu"))
"""
    assert "pass sharders=cowclip_sharders()" in run(program).stderr
