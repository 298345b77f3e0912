"""How the dense layers compute: precision and torch.compile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from stampede.settings import SettingsError


@dataclass(frozen=True)
class DensePrecision:
    """The precision of the dense layers, for a reason to be logged.

    Attributes:
        is_bf16: whether matrix products use bfloat16 inputs; sums and weights are float32.
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


def choose_precision(asked: str, device: torch.device) -> DensePrecision:
    """The requested `fp32`, `tf32` or `bf16` if the device supports it and is not slower with it.

    Without CPU instructions for it, bf16 is many times slower than float32, so both are timed on a
    layer's products.
    """
    if asked == "fp32":
        return DensePrecision(False, "fp32")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return DensePrecision(False, f"fp32 instead of {asked}, which this GPU does not support")
    if device.type == "cuda":
        return DensePrecision(asked == "bf16", asked, is_tf32=asked == "tf32")
    if asked == "tf32":
        return DensePrecision(False, "fp32 instead of tf32, which a CPU does not support")
    ratio = _speed_of_bf16()
    if ratio > 1.0:
        return DensePrecision(True, f"bf16, {ratio:.1f} times as fast as fp32 on this CPU")
    return DensePrecision(
        False, f"fp32 instead of bf16, which is {1 / ratio:.1f} times slower on this CPU"
    )


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


def compile_network(network: nn.Module, how: str, device: torch.device) -> None:
    """Compile a network's forward and backward with `torch.compile` at its first call.

    Names of parameters do not change. Every batch size is compiled separately: there are few (full
    and last batches of training and evaluation), and an epoch's last batch must not slow down the
    others. After 8 sizes torch compiles no more.

    Args:
        how: `train.compile`; `cuda_graphs` also records each size's launches as one graph.

    Raises:
        SettingsError: CUDA graphs were requested on a CPU.
    """
    if how == "none":
        return
    if how == "cuda_graphs" and device.type != "cuda":
        raise SettingsError(
            "train.compile: found 'cuda_graphs', but this run is on the CPU; write "
            "train.compile=default or none"
        )
    network.compile(dynamic=False, mode="reduce-overhead" if how == "cuda_graphs" else None)
