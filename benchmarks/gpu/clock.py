"""Seconds on a device that works through a queue."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def seconds_until_done(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call and of everything that it queued; nothing else is queued before."""
    _drain(device)
    start = time.perf_counter()
    call()
    _drain(device)
    return time.perf_counter() - start


def device_seconds(calls: list[Callable[[], Any]], device: torch.device) -> list[float]:
    """Seconds from the end of one call to that of the next, as the device sees it.

    Where it is faster than the host it waits, and that counts.
    """
    if device.type != "cuda":
        return [seconds_until_done(call, device) for call in calls]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    _drain(device)
    marks[0].record()
    for call, mark in zip(calls, marks[1:], strict=True):
        call()
        mark.record()
    _drain(device)
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]


def kernel_times(
    calls: list[Callable[[], Any]], device: torch.device
) -> list[tuple[str, int, float]]:
    """What some calls launch: name, how often, and seconds, of all calls together.

    On a CPU operators stand for kernels.
    """
    on_gpu = device.type == "cuda"
    _drain(device)
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:
        for call in calls:
            call()
        _drain(device)
    taken = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    found = [(e.key, e.count, getattr(e, taken) / 1e6) for e in profiled.key_averages()]
    return sorted(found, key=lambda kernel: kernel[2], reverse=True)


def _drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
