"""Lookup and update of the tables alone: ours beside FBGEMM's fused ADAM.

Forward and backward together: with `rows: all` ours sorts in forward, and brings rows up to date.
"""

from __future__ import annotations

import statistics
from functools import partial

import torch
from clicks import cardinalities
from clock import device_seconds
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from resident_clicks import drawn_ids
from torch import nn

from stampede.optim import CowClip
from stampede.optim.missed_steps import WINDOW
from stampede.optim.settings import UpdateSettings
from support.updated_tables import Tables, of_rows

COLUMNS, CLIPPED = 12, 10
BATCHES = (8192, 32768, 131072, 524288)
IDS = 33_800_000
# So many batches take turns.
DIFFERENT = 4


def measure(device: torch.device, quick: bool = False) -> dict:
    """Median seconds of forward and backward, by batch size and contender, and their ratios."""
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
        seconds = {
            name: _step_seconds(tbe, sizes, batch, repeats, device)
            for name, tbe in contenders.items()
        }
        ratios = {n: s / seconds["fbgemm_adam"] for n, s in seconds.items() if n != "fbgemm_adam"}
        found[str(batch)] = {"seconds": seconds, "of_fbgemm_adam": ratios}
        shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        print(f"update at {batch:>7,}: {shown} of FBGEMM's ADAM", flush=True)
    return found


def _fbgemm(sizes: list[int], device: torch.device) -> nn.Module:
    place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
    # On a CPU FBGEMM has no ADAM; there only the script is tried out.
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


def _step_seconds(
    tbe: nn.Module, sizes: list[int], batch: int, repeats: int, device: torch.device
) -> float:
    draw = torch.Generator(device).manual_seed(batch)
    ids = [drawn_ids(batch, sizes, draw).T.reshape(-1) for _ in range(DIFFERENT)]
    offsets = torch.arange(len(sizes) * batch + 1, device=device)
    grad = torch.randn(batch, len(sizes) * COLUMNS, generator=draw, device=device) / batch

    def forward_and_backward(number: int) -> None:
        tbe(ids[number % DIFFERENT], offsets).backward(grad)

    # The first steps compile, and after a window of them as many rows wait as ever will.
    calls = [partial(forward_and_backward, number) for number in range(WINDOW + repeats)]
    return statistics.median(device_seconds(calls, device)[WINDOW:])
