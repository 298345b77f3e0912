"""A network of a user's own that is edited between two runs."""

from pathlib import Path

from stampede.engine.errors import RunFolderError
from support.jobs import run_small

OWN = """
from torch import nn
from stampede.models import register

@register("own_layers")
class OwnLayers(nn.Module):
    def __init__(self, shape, generator):
        super().__init__()
        self.first = nn.Linear(shape.inputs, 4)
        self.scale = nn.LayerNorm(4)
        self.last = nn.Linear(4, 1)

    def forward(self, embeddings, dense):
        inputs = nn.functional.pad(embeddings.flatten(1), [0, dense.shape[1]])
        return self.last(self.scale(self.first(inputs))).squeeze(1)
"""


def refusal(folder: Path, overrides: list[str], world_size: int = 1) -> str | None:
    """Why a run cannot be used; None where it can. Also as a rank of several."""
    try:
        run_small(folder, overrides, world_size)
    except RunFolderError as failure:
        return str(failure)
    return None
