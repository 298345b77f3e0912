"""The precision of the dense layers: float32, TF32 or bfloat16."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class DensePrecision:
    """The precision of the dense layers, and the reason, which is logged.

    With bf16, sums and weights stay float32; with tf32, a GPU rounds the inputs of products.
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


def choose_precision(asked: str, device: torch.device) -> DensePrecision:
    """The requested precision if the device supports it and is not slower with it, else `fp32`.

    `auto` requests `bf16`. Without CPU instructions for it, bf16 is many times slower than float32,
    so both are timed.
    """
    if asked == "fp32":
        return DensePrecision(False, "fp32")
    wanted = "bf16" if asked == "auto" else asked
    instead = "fp32" if asked == "auto" else f"fp32 instead of {asked}"
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) >= (8, 0):
            return DensePrecision(wanted == "bf16", wanted, is_tf32=wanted == "tf32")
        return DensePrecision(False, f"{instead}: this GPU does not support {wanted}")
    if wanted == "tf32":
        return DensePrecision(False, f"{instead}: a CPU does not support tf32")
    ratio = _speed_of_bf16()
    if ratio > 1.0:
        return DensePrecision(True, f"bf16, {ratio:.1f} times as fast as fp32 on this CPU")
    longer = f"{1 / ratio:.1f} times as long on this CPU"
    return DensePrecision(False, f"{instead}: bf16 takes {longer}")


@cache
def _speed_of_bf16(rows: int = 2048, width: int = 400, repeats: int = 3) -> float:
    """Speed of a layer's forward and backward in bf16, relative to float32."""
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
        # The first repeat also sets up libraries.
        seconds[bf16] = min(found[1:])
    return seconds[False] / seconds[True]
