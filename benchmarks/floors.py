"""Speed of torch alone on this machine: memory bandwidth, matrix products, the MLP."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise

import torch
from timing import interleaved, seconds_of
from torch import nn

from stampede.models.mlp import MLP
from stampede.native_library import switched_off

# DeepFM's MLP over 26 fields of 10 columns and 13 numbers.
INPUTS, HIDDEN = 26 * 10 + 13, (400, 400, 400)

# Samples of a tile: the smallest batch, and the most that stay in cache.
ROWS = (1024, 2048)

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure(quick: bool = False) -> dict:
    """Medians: bytes copied a second, floating-point operations a second, samples a second."""
    repeats, passes = (2, 2) if quick else (7, 20)
    contenders = {"copy": _copy(1 << (24 if quick else 28))}
    for rows in ROWS:
        for precision in PRECISIONS:
            contenders[f"mlp {precision} {rows}"] = _mlp(rows, precision, passes)
    for precision in PRECISIONS:
        contenders[f"gemm {precision}"] = _products(max(ROWS), precision, passes)
    seconds = {
        name: statistics.median(taken) for name, taken in interleaved(contenders, repeats).items()
    }
    return {
        # Each byte is read once and written once.
        "copy_bytes_per_second": 2 * (1 << (24 if quick else 28)) / seconds["copy"],
        "gemm_flops": {
            precision: passes * max(ROWS) * _flops() / seconds[f"gemm {precision}"]
            for precision in PRECISIONS
        },
        "mlp_samples_per_second": {
            precision: {
                str(rows): passes * rows / seconds[f"mlp {precision} {rows}"] for rows in ROWS
            }
            for precision in PRECISIONS
        },
    }


def mlp_samples_per_second(found: dict, precision: str, batch: int) -> float:
    """The MLP alone at a batch size; larger batches are tiled."""
    by_rows = found["mlp_samples_per_second"][precision]
    return by_rows[str(min(batch, max(ROWS)))]


def _flops() -> int:
    """Operations of a sample's forward pass in the hidden layers."""
    widths = (INPUTS, *HIDDEN)
    return sum(2 * a * b for a, b in pairwise(widths))


def _copy(size: int) -> Callable[[], float]:
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    return lambda: seconds_of(lambda: target.copy_(source))


def _products(rows: int, precision: str, passes: int) -> Callable[[], float]:
    """Only the products of the hidden layers' forward pass."""
    dtype = PRECISIONS[precision]
    widths = (INPUTS, *HIDDEN)
    factors = [
        (torch.randn(rows, a, dtype=dtype), torch.randn(b, a, dtype=dtype))
        for a, b in pairwise(widths)
    ]

    def run() -> None:
        for _ in range(passes):
            for batch, weight in factors:
                nn.functional.linear(batch, weight)

    return lambda: seconds_of(run)


def _mlp(rows: int, precision: str, passes: int) -> Callable[[], float]:
    """Forward and backward in plain torch; bf16 uses autocast."""
    mlp = MLP(INPUTS, HIDDEN, torch.Generator().manual_seed(0))
    batch = torch.randn(rows, INPUTS, requires_grad=True)

    def run() -> None:
        for _ in range(passes):
            batch.grad = None
            mlp.zero_grad(set_to_none=True)
            autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
            with switched_off(), autocast:
                out = mlp(batch)
            out.float().sum().backward()

    return lambda: seconds_of(run)
