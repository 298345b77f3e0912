"""The optimizers with CowClip, and one table that they train."""

import io

import pytest
import torch
from torch import nn

from stampede.optim import (
    CowClipAdagrad,
    CowClipAdam,
    CowClipRowWiseAdagrad,
    CowClipRowWiseAdam,
    CowClipSGD,
)

CLASSES = {
    "adam": CowClipAdam,
    "rowwise_adam": CowClipRowWiseAdam,
    "adagrad": CowClipAdagrad,
    "rowwise_adagrad": CowClipRowWiseAdagrad,
    "sgd": CowClipSGD,
}
EVERY_CLASS = pytest.mark.parametrize("optimizer_class", CLASSES.values())


def table(rows=20, dim=4, seed=0, dtype=torch.float32, **options):
    made = nn.Embedding(rows, dim, sparse=True, dtype=dtype, **options)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        made.weight.copy_(torch.randn(rows, dim, generator=draw, dtype=torch.float64))
    return made


def ids_of_step(step, rows=20, size=8):
    return torch.randint(0, rows, (size,), generator=torch.Generator().manual_seed(step))


def train(made, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        made(ids_of_step(step)).square().sum().backward()
        optimizer.step()


def saved_and_loaded(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file)  # weights_only, as torch does by default
