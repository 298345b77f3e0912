"""Time of a training step by kernel."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch
from clicks import cardinalities
from clock import kernel_times
from job import deepfm
from resident_clicks import ResidentClicks

from stampede.data import GlobalBatches, Order
from stampede.engine.processes import processes
from stampede.engine.step import prefetch, train_step

IDS, BATCH, STEPS, WARM_UP = 33_800_000, 131072, 20, 10


def measure(device: torch.device, quick: bool = False) -> Iterator[list[dict]]:
    """The kernels that take the most time: name, calls and microseconds a step."""
    sizes = cardinalities(20_000 if quick else IDS)
    batch, steps, warm_up = (256, 2, 1) if quick else (BATCH, STEPS, WARM_UP)
    with processes(device.type) as here:
        clicks = ResidentClicks((steps + warm_up + 1) * batch, sizes, device)
        job = deepfm(sizes, here.device, precision="bf16")
        batches = GlobalBatches(clicks, list(job.front.fields), batch, 0, 1, Order(clicks.rows))
        source = prefetch(batches, job.front, here.device)
        numbers = count(1)

        def step() -> None:
            train_step(job, next(source), next(numbers), here)

        for _ in range(warm_up):
            step()
        kernels = kernel_times([step] * steps, here.device)
    table = [
        {
            "name": name[:100],
            "calls_a_step": calls / steps,
            "microseconds_a_step": 1e6 * seconds / steps,
        }
        for name, calls, seconds in kernels[:30]
    ]
    for row in table[:12]:
        print(f"{row['microseconds_a_step']:>10.0f} us  {row['name'][:80]}", flush=True)
    yield table
