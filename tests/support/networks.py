"""Every network, and options that change what it is made of."""

import json
from pathlib import Path

import torch
from torch import Tensor

from stampede.engine.config import Config
from stampede.engine.processes import processes
from stampede.engine.step import add_tile, average_gradients_, sum_over_ranks
from stampede.models import network, network_names
from support.jobs import Trained, small_config, train_an_epoch_in

# Those of examples and of other tests are not ours.
OURS = [name for name in network_names() if network(name).module.__module__.startswith("stampede.")]
VARIANTS = [
    *((name, {}) for name in OURS),
    ("dcnv2", {"cross": "full"}),
    ("dcnv2", {"experts": 1}),
    ("autoint", {"deep": True}),
    (
        "destine",
        {"unary": "field", "residual_mode": "each_layer", "use_scale": True, "relu": False}
        | {"deep": True},
    ),
    ("destine", {"residual_mode": "none", "layers": 1}),
    ("finalmlp", {"heads": 2, "second": [6], "gates": None}),
    ("finalmlp", {"gates": []}),
    ("masknet", {"structure": "serial", "reduction": 0.5}),
    ("wukong", {"bottom": None, "rank": None, "layers": 1}),
]
# Defaults that take seconds.
_SMALLER = {
    "xdeepfm": {"cin": [8, 6]},
    "autoint": {"layers": 2, "width": 8},
    "destine": {"layers": 2, "width": 8},
    "wukong": {"layers": 2, "fmb_mlp_units": [32], "bottom": [32], "rank": 4},
}


def variant_id(value: object) -> str:
    """What pytest calls it."""
    return value if isinstance(value, str) else json.dumps(value)


def train_networks(
    folder: Path, variants: list[tuple[str, dict]], overrides: list[str], world_size: int = 1
) -> list[Trained]:
    """An epoch each on synthetic clicks that can be learned in a second; also as a rank of several.

    Args:
        variants: names and options of the networks.
        overrides: of the configuration.
    """
    # One process group for all: the port of one that was left may still be in use.
    with processes("cpu") as here:
        return [
            train_an_epoch_in(here, network_config(folder, *variant, overrides, world_size))
            for variant in variants
        ]


def network_config(
    folder: Path, name: str, options: dict, overrides: list[str], world_size: int
) -> Config:
    """The job that trains a network."""
    options = {**_SMALLER.get(name, {}), **options}
    return small_config(
        folder,
        f"model.name={name}",
        f"model.options={json.dumps(options)}",
        "model.dim=4",
        "model.init_std=1e-2",
        "data.scale=0.0001",
        "data.zipf=1.5",
        "model.hidden=[32]",
        "optim.embedding.lr=1e-2",
        "optim.dense.lr=3e-3",
        "optim.dense.schedule.warmup=0.1",
        *overrides,
        world_size=world_size,
    )


def averaged_gradients() -> list[Tensor]:
    """Means over two ranks, of which each gives a gradient to another one of three parameters."""
    with processes("cpu") as here:
        parameters = [torch.nn.Parameter(torch.ones(size)) for size in (2, 3, 4)]
        (parameters[here.rank].sum() * 4).backward()
        average_gradients_(parameters, here.world_size)
    return [parameter.grad for parameter in parameters]


def sums_in_order() -> tuple[Tensor, Tensor]:
    """Sums over 8 tiles on some ranks, in their tree and one after the other."""
    # No multiple of the ranks.
    tiles = torch.randn(8, 1001, generator=torch.Generator().manual_seed(3))
    with processes("cpu") as here:
        sums = []
        for number, tile in enumerate(tiles.clone().chunk(here.world_size)[here.rank], 1):
            add_tile(sums, number, [tile])
        ((mine,),) = sums
        if here.world_size > 1:
            mine = sum_over_ranks(mine, here.world_size, in_order=True)
    one_by_one = torch.zeros(1001)
    for tile in tiles:
        one_by_one += tile
    return mine, one_by_one
