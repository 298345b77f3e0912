"""Speed of torch alone on this machine: memory bandwidth, matrix products, the MLP."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise

import torch
from timing import interleaved, seconds_of
from torch import nn

from stampede.models import NetworkShape
from stampede.models.mlp import MLP
from stampede.native_library import switched_off

# DeepFM's MLP over 26 fields of 10 columns and 13 numbers.
INPUTS, HIDDEN = 26 * 10 + 13, (400, 400, 400)

# Samples of a tile: the smallest batch, and the most that stay in cache.
ROWS = (1024, 2048)

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Operations of a sample's forward pass in the hidden layers.
WIDTHS = [*pairwise((INPUTS, *HIDDEN))]
FLOPS = sum(2 * a * b for a, b in WIDTHS)


def measure(quick: bool = False) -> dict:
    """Medians: bytes copied a second, floating-point operations a second, samples a second."""
    repeats, passes, size = (2, 2, 1 << 24) if quick else (7, 20, 1 << 28)
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    calls = {"copy": lambda: target.copy_(source)}
    for precision in PRECISIONS:
        for rows in ROWS:
            calls[f"mlp {precision} {rows}"] = _mlp(rows, precision)
        calls[f"gemm {precision}"] = _products(max(ROWS), precision)
    contenders = {
        name: lambda call=call, times=1 if name == "copy" else passes: seconds_of(
            lambda: [call() for _ in range(times)]
        )
        for name, call in calls.items()
    }
    taken = interleaved(contenders, repeats)
    seconds = {name: statistics.median(each) for name, each in taken.items()}
    return {
        # Each byte is read once and written once.
        "copy_bytes_per_second": 2 * size / seconds["copy"],
        "gemm_flops": {p: passes * max(ROWS) * FLOPS / seconds[f"gemm {p}"] for p in PRECISIONS},
        "mlp_samples_per_second": {
            p: {str(rows): passes * rows / seconds[f"mlp {p} {rows}"] for rows in ROWS}
            for p in PRECISIONS
        },
    }


def mlp_samples_per_second(found: dict, precision: str, batch: int) -> float:
    """The MLP alone at a batch size; larger batches are tiled."""
    return found["mlp_samples_per_second"][precision][str(min(batch, max(ROWS)))]


def _products(rows: int, precision: str) -> Callable[[], object]:
    """Only the products of the hidden layers' forward pass."""
    like = {"dtype": PRECISIONS[precision]}
    factors = [(torch.randn(rows, a, **like), torch.randn(b, a, **like)) for a, b in WIDTHS]
    return lambda: [nn.functional.linear(batch, weight) for batch, weight in factors]


def _mlp(rows: int, precision: str) -> Callable[[], object]:
    """Forward and backward in plain torch; bf16 uses autocast."""
    mlp = MLP(INPUTS, NetworkShape(26, 10, 13, HIDDEN), torch.Generator().manual_seed(0))
    batch = torch.randn(rows, INPUTS, requires_grad=True)

    def run() -> None:
        batch.grad = None
        mlp.zero_grad(set_to_none=True)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
        with switched_off(), autocast:
            out = mlp(batch)
        out.float().sum().backward()

    return run
