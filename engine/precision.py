"""In which precision the dense layers compute."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

Precision = Literal["fp32", "tf32", "bf16"]


@dataclass(frozen=True)
class DensePrecision:
    """What was chosen, and why.

    Attributes:
        is_bf16: whether matrix products take bfloat16 inputs; sums and weights are float32.
        reason: for the log.
        is_tf32: whether a GPU rounds the inputs of float32 products to TF32.
    """

    is_bf16: bool
    reason: str
    is_tf32: bool = False

    @contextmanager
    def computing(self, device: torch.device) -> Iterator[None]:
        """The context of the dense layers' forward and backward."""
        before = torch.get_float32_matmul_precision()
        if self.is_tf32:
            torch.set_float32_matmul_precision("high")
        try:
            with torch.autocast(device.type, torch.bfloat16, enabled=self.is_bf16):
                yield
        finally:
            if self.is_tf32:
                torch.set_float32_matmul_precision(before)


def choose_precision(asked: Precision, device: torch.device) -> DensePrecision:
    """TF32 where it is asked for and known; bf16 where it is asked for and not slower.

    On a CPU without instructions for it, bf16 is many times slower than float32; so there the
    two are measured on a layer's products.
    """
    if asked == "fp32":
        return DensePrecision(False, "fp32")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return DensePrecision(False, f"fp32 instead of {asked}, which this GPU does not know")
    if device.type == "cuda":
        return DensePrecision(asked == "bf16", asked, is_tf32=asked == "tf32")
    if asked == "tf32":
        return DensePrecision(False, "fp32 instead of tf32, which a CPU does not know")
    ratio = _speed_of_bf16()
    if ratio > 1.0:
        return DensePrecision(True, f"bf16, {ratio:.1f} times as fast as fp32 on this CPU")
    return DensePrecision(
        False, f"fp32 instead of bf16, which is {1 / ratio:.1f} times slower on this CPU"
    )


def _speed_of_bf16(rows: int = 2048, width: int = 400, repeats: int = 3) -> float:
    """How many times as fast as in float32 a layer's forward and backward are in bf16."""
    with torch.random.fork_rng():
        layer, batch = nn.Linear(width, width), torch.randn(rows, width, requires_grad=True)
    seconds = {}
    for bf16 in (False, True):
        found = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                out = functional.relu(layer(batch))
            out.float().sum().backward()
            found.append(time.perf_counter() - start)
        # The first one also sets the libraries up.
        seconds[bf16] = min(found[1:])
    return seconds[False] / seconds[True]
