"""Lookup and update of the tables alone: ours against FBGEMM's fused ADAM.

Both are timed together: with `rows: all`, ours sorts and brings rows up to date in forward.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from clicks import cardinalities
from clock import device_seconds, kernel_times
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from resident_clicks import drawn_ids
from torch import Tensor, nn

from stampede.optim import CowClip
from stampede.optim.settings import UpdateSettings
from stampede.optim.waiting_rows import WINDOW
from support.updated_tables import Tables, of_rows

COLUMNS, CLIPPED = 12, 10
BATCHES = (8192, 32768, 131072, 524288)
IDS = 33_800_000
# Number of different batches that take turns.
DIFFERENT = 4


def measure(device: torch.device, quick: bool = False) -> Iterator[dict]:
    """Median seconds of forward and backward, by batch size and contender, and their ratios.

    `update_of_fbgemm_adam` is the ratio after subtracting FBGEMM's forward from both: our sort,
    replay and update to its backward. There is also a ratio of kernel times, without waiting for a
    slower host. Yielded as it grows.
    """
    sizes = cardinalities(20_000 if quick else IDS)
    batches, repeats = ((256, 512), 4) if quick else (BATCHES, 40)
    contenders = {"fbgemm_adam": _fbgemm(sizes, device)}
    for rows in ("touched", "all"):
        settings = UpdateSettings(l2=1e-5, clip=CowClip(columns=CLIPPED), rows=rows)
        features = list(range(len(sizes)))
        contenders[f"ours_{rows}"] = Tables(
            of_rows(*sizes), [COLUMNS] * len(sizes), features, setting=settings, device=device
        ).tbe
    found = {}
    for batch in batches:
        inputs = _inputs(sizes, batch, device)
        seconds = {
            name: _step_seconds(partial(_step, tbe, inputs), repeats, device)
            for name, tbe in contenders.items()
        }
        only_lookup = partial(_lookup, contenders["fbgemm_adam"], inputs)
        lookup = _step_seconds(only_lookup, repeats, device)
        of_kernels = {
            name: _kernel_seconds(partial(_step, tbe, inputs), repeats, device)
            for name, tbe in contenders.items()
        }
        lookup_of_kernels = _kernel_seconds(only_lookup, repeats, device)
        found[str(batch)] = {
            "seconds": seconds,
            "fbgemm_forward_seconds": lookup,
            "kernel_seconds": of_kernels,
            "fbgemm_forward_kernel_seconds": lookup_of_kernels,
            "of_fbgemm_adam": _ratios(seconds, 0.0),
            "update_of_fbgemm_adam": _ratios(seconds, lookup),
            "update_kernels_of_fbgemm_adam": _ratios(of_kernels, lookup_of_kernels),
        }
        for what in ("update", "update_kernels"):
            ratios = found[str(batch)][f"{what}_of_fbgemm_adam"].items()
            shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios)
            print(f"{what} at {batch:>7,}: {shown} of FBGEMM's ADAM", flush=True)
        yield found


def _ratios(seconds: dict[str, float], lookup: float) -> dict[str, float]:
    """Ratio of ours to FBGEMM's, both without a lookup."""
    whole = seconds["fbgemm_adam"] - lookup
    return {
        name: (spent - lookup) / whole for name, spent in seconds.items() if name != "fbgemm_adam"
    }


def _fbgemm(sizes: list[int], device: torch.device) -> nn.Module:
    place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
    # FBGEMM has no ADAM on a CPU, where this only tests the script.
    optimizer = EmbOptimType.EXACT_ADAGRAD
    if device.type == "cuda":
        place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        optimizer = EmbOptimType.ADAM
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(size, COLUMNS, *place) for size in sizes],
        optimizer=optimizer,
        learning_rate=1e-3,
        device=device,
    )


class _Inputs(NamedTuple):
    """Ids of some batches, and the inputs that all batches share."""

    ids: list[Tensor]
    offsets: Tensor
    grad: Tensor


def _inputs(sizes: list[int], batch: int, device: torch.device) -> _Inputs:
    draw = torch.Generator(device).manual_seed(batch)
    return _Inputs(
        ids=[drawn_ids(batch, sizes, draw).T.reshape(-1) for _ in range(DIFFERENT)],
        offsets=torch.arange(len(sizes) * batch + 1, device=device),
        grad=torch.randn(batch, len(sizes) * COLUMNS, generator=draw, device=device) / batch,
    )


def _lookup(tbe: nn.Module, inputs: _Inputs, number: int) -> Tensor:
    return tbe(inputs.ids[number % DIFFERENT], inputs.offsets)


def _step(tbe: nn.Module, inputs: _Inputs, number: int) -> None:
    _lookup(tbe, inputs, number).backward(inputs.grad)


def _step_seconds(call: Callable[[int], Any], repeats: int, device: torch.device) -> float:
    # The first steps compile; after a window the number of waiting rows is steady.
    calls = [partial(call, number) for number in range(WINDOW + repeats)]
    return statistics.median(device_seconds(calls, device)[WINDOW:])


def _kernel_seconds(call: Callable[[int], Any], repeats: int, device: torch.device) -> float:
    kernels = kernel_times([partial(call, number) for number in range(repeats)], device)
    return sum(seconds for _, _, seconds in kernels) / repeats
