"""Which kernels a training step spends its time in."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from clicks import cardinalities
from job import deepfm
from resident_clicks import ResidentClicks
from torch.profiler import ProfilerActivity, profile

from stampede.data import GlobalBatches, Order
from stampede.engine.ahead import sent_ahead
from stampede.engine.processes import processes
from stampede.engine.step import train_step

IDS, BATCH, STEPS, WARM_UP = 33_800_000, 131072, 20, 10


def measure(device: torch.device, quick: bool = False) -> Iterator[list[dict]]:
    """The kernels that take the most time: name, calls and microseconds a step."""
    sizes = cardinalities(20_000 if quick else IDS)
    batch, steps, warm_up = (256, 2, 1) if quick else (BATCH, STEPS, WARM_UP)
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with processes(device.type) as here:
        clicks = ResidentClicks((steps + warm_up + 1) * batch, sizes, device)
        job = deepfm(sizes, here.device, precision="bf16")
        batches = GlobalBatches(clicks, list(job.front.fields), batch, 0, 1, Order(clicks.rows))
        source = sent_ahead(batches, job.front, here.device)
        for number in range(1, warm_up + 1):
            train_step(job, next(source), number, here)
        with profile(activities=[activity]) as profiled:
            for number in range(warm_up + 1, warm_up + steps + 1):
                train_step(job, next(source), number, here)
            if device.type == "cuda":
                torch.cuda.synchronize()
    taken = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    events = sorted(profiled.key_averages(), key=lambda e: getattr(e, taken), reverse=True)
    table = [
        {
            "name": event.key[:100],
            "calls_a_step": event.count / steps,
            "microseconds_a_step": getattr(event, taken) / steps,
        }
        for event in events[:30]
    ]
    for row in table[:12]:
        print(f"{row['microseconds_a_step']:>10.0f} us  {row['name'][:80]}", flush=True)
    yield table
