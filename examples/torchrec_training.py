"""A TorchRec program, alone or under `torchrun --nproc_per_node 2`; two lines bring CowClip."""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from stampede.optim import CowClip, CowClipAdam, cowclip_sharders

FIELDS, IDS, DIM, BATCH, STEPS = ["user", "item", "page"], 1000, 16, 2048, 100


class Model(nn.Module):
    """A network over the embeddings of all fields."""

    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(name=f, feature_names=[f], num_embeddings=IDS,
                                     embedding_dim=DIM) for f in FIELDS]  # fmt: skip
        self.tables = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.mlp = nn.Sequential(nn.Linear(DIM * len(FIELDS), 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Logits, `[batch]`; the order of the tables' outputs is the plan's."""
        embedded = self.tables(features)
        return self.mlp(torch.cat([embedded[field] for field in FIELDS], dim=1)).squeeze(1)


def clicks(taste: Tensor, draw: torch.Generator) -> tuple[KeyedJaggedTensor, Tensor]:
    """This rank's part of a batch: few ids are frequent, and each has a taste for clicks."""
    samples = BATCH // dist.get_world_size()
    ids = (IDS * torch.rand(len(FIELDS), samples, generator=draw) ** 3).long()
    features = KeyedJaggedTensor(FIELDS, ids.flatten(), lengths=torch.ones_like(ids).flatten())
    return features, torch.bernoulli(taste.gather(1, ids).sum(0).sigmoid(), generator=draw)


alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
dist.init_process_group("gloo", **alone)
torch.manual_seed(0)
model, taste = Model(), torch.randn(len(FIELDS), IDS)
settings = {"lr": 1e-2, "l2": 1e-5, "clip": CowClip()}
apply_optimizer_in_backward(CowClipAdam, model.tables.parameters(), settings)  # line 1: was SGD
model = DistributedModelParallel(model, sharders=cowclip_sharders())  # line 2
dense = torch.optim.Adam(model.module.mlp.parameters(), lr=1e-3)
draw = torch.Generator().manual_seed(dist.get_rank())
for step in range(STEPS + 1):
    features, labels = clicks(taste, draw)
    loss = cross_entropy(model(features), labels)  # the mean over this rank's part
    if step in (0, STEPS) and dist.get_rank() == 0:  # on clicks not seen before
        print(f"loss after {step:3} steps: {loss.item():.4f}")
    dense.zero_grad()
    loss.backward()  # updates the tables
    dense.step()
dist.barrier()
