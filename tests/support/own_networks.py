"""Networks of a user's own that do what none of ours does."""

from pathlib import Path

from stampede.models import network
from support.jobs import small_config, train_an_epoch

NUMBERS_ONLY = """
from torch import nn
from stampede.models import register

@register("numbers_only")
class NumbersOnly(nn.Module):
    def __init__(self, shape, generator):
        super().__init__()
        self.layer = nn.Linear(shape.numbers, 1)

    def forward(self, embeddings, dense):
        return self.layer(dense).squeeze(1)
"""
DROPPING = """
from torch import nn
from stampede.models import register

@register("dropping")
class Dropping(nn.Module):
    def __init__(self, shape, generator):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(shape.fields * shape.dim, 16), nn.Dropout(0.3), nn.Linear(16, 1)
        )

    def forward(self, embeddings, dense):
        return self.layers(embeddings.flatten(1)).squeeze(1)
"""
# Notes a number that is drawn in each forward of the training.
DRAWING = "import torch\n" + DROPPING.replace(
    "        return self",
    """\
        if self.training and torch.is_grad_enabled() and len(dense) > 32:
            DRAWN.append(torch.rand(()).item())
        return self""",
).replace("@register", "DRAWN = []\n\n@register")


def own_network(folder: Path, name: str, text: str) -> list[str]:
    """Overrides of a job with a network in a file."""
    (folder / "own.py").write_text(text)
    return [f"model.import={folder}/own.py", f"model.name={name}", "model.init_std=0.1"]


def drawn_in_training(folder: Path, overrides: list[str], world_size: int = 1) -> list[float]:
    """What each step of an epoch of `DRAWING` drew; also as a rank of several."""
    # Seven whole batches.
    config = small_config(
        folder, "data.rows=1792", "evaluate.select_on=test", *overrides, world_size=world_size
    )
    train_an_epoch(config)
    return network("dropping").module.__init__.__globals__["DRAWN"]
