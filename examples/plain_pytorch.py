"""A wide & deep click model as DeepCTR-Torch and FuxiCTR build it; two lines bring CowClip."""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from stampede.optim import CowClip, CowClipAdam

FIELDS = {"user": 3000, "item": 1000, "page": 200, "device": 10}  # ids of each
BATCH, STEPS, DIM = 2048, 150, 8


def table(ids: int, dim: int) -> nn.Embedding:
    """A field's table; sparse gradients carry the counts that CowClip needs."""
    made = nn.Embedding(ids, dim, sparse=True)  # line 1; was nn.Embedding(ids, dim)
    nn.init.normal_(made.weight, std=1e-2)
    return made


class WideAndDeep(nn.Module):
    """A weight for each id, and a network over the embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleDict({field: table(ids, 1) for field, ids in FIELDS.items()})
        self.deep = nn.ModuleDict({field: table(ids, DIM) for field, ids in FIELDS.items()})
        self.mlp = nn.Sequential(nn.Linear(len(FIELDS) * DIM, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: dict[str, Tensor]) -> Tensor:
        """Logits, `[batch]`, of ids, `[batch]` for each field."""
        wide = sum(self.wide[field](ids[field]) for field in FIELDS)
        deep = self.mlp(torch.cat([self.deep[field](ids[field]) for field in FIELDS], dim=1))
        return (wide + deep).squeeze(1)


def clicks(taste: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """A batch in which few ids are frequent, and its clicks, drawn from a taste for each id."""
    ids = {field: (n * torch.rand(BATCH) ** 3).long() for field, n in FIELDS.items()}
    return ids, torch.bernoulli(sum(taste[field][ids[field]] for field in FIELDS).sigmoid())


torch.manual_seed(0)
model, taste = WideAndDeep(), {field: torch.randn(n) for field, n in FIELDS.items()}
tables = [{"params": model.deep.parameters()}, {"params": model.wide.parameters(), "clip": None}]
dense = torch.optim.Adam(model.mlp.parameters(), lr=1e-3)  # had been given all parameters
sparse = CowClipAdam(tables, lr=1e-2, l2=1e-5, clip=CowClip())  # line 2; the wide part unclipped

for step in range(STEPS + 1):
    ids, labels = clicks(taste)
    loss = cross_entropy(model(ids), labels)  # the mean over the batch, not the sum
    if step in (0, STEPS):  # on clicks not seen before
        print(f"loss after {step:3} steps: {loss.item():.4f}")
    loss.backward()
    for optimizer in (dense, sparse):
        optimizer.step()
        optimizer.zero_grad()
