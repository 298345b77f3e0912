"""A wide & deep click model as DeepCTR-Torch and FuxiCTR build them, with CowClip.

Two lines differ from the usual program, marked below. Run it with
`python examples/plain_pytorch.py`: a few seconds on a CPU.
"""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from stampede.optim import CowClip, CowClipAdam

FIELDS = {"user": 5000, "item": 2000, "page": 300, "device": 10}  # ids of each
BATCH, STEPS, DIM = 2048, 200, 8


class WideAndDeep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleDict({name: table(ids, 1) for name, ids in FIELDS.items()})
        self.deep = nn.ModuleDict({name: table(ids, DIM) for name, ids in FIELDS.items()})
        self.mlp = nn.Sequential(nn.Linear(len(FIELDS) * DIM, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: dict[str, torch.Tensor]) -> torch.Tensor:
        wide = sum(self.wide[name](ids[name]) for name in FIELDS)
        deep = torch.cat([self.deep[name](ids[name]) for name in FIELDS], dim=1)
        return (wide + self.mlp(deep)).squeeze(1)


def table(ids: int, dim: int) -> nn.Embedding:
    made = nn.Embedding(ids, dim, sparse=True)  # 1: was nn.Embedding(ids, dim)
    nn.init.normal_(made.weight, std=1e-2)
    return made


def clicks(taste: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A batch of ids, few of them frequent, and clicks that depend on each id."""
    ids = {name: (n * torch.rand(BATCH) ** 3).long() for name, n in FIELDS.items()}
    logit = sum(taste[name][ids[name]] for name in FIELDS)
    return ids, torch.bernoulli(torch.sigmoid(logit))


def main() -> None:
    torch.manual_seed(0)
    taste, model = {name: torch.randn(n) for name, n in FIELDS.items()}, WideAndDeep()
    tables = {"params": model.deep.parameters()}, {"params": model.wide.parameters(), "clip": None}
    # 2: was [torch.optim.Adam(model.parameters(), lr=1e-3)]
    optimizers = [CowClipAdam(tables, lr=1e-2, l2=1e-5, clip=CowClip())]
    optimizers += [torch.optim.Adam(model.mlp.parameters(), lr=1e-3)]
    for step in range(STEPS):
        ids, label = clicks(taste)
        loss = cross_entropy(model(ids), label)  # the mean over the batch
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if step in (0, STEPS - 1):
            print(f"step {step + 1:3}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
