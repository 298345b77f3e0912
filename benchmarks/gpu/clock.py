"""Timing on a device with a queue."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def seconds_until_done(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call and everything it queued; the queue is emptied first."""
    _drain(device)
    start = time.perf_counter()
    call()
    _drain(device)
    return time.perf_counter() - start


def device_seconds(calls: list[Callable[[], Any]], device: torch.device) -> list[float]:
    """Seconds from the end of one call to the end of the next on the device.

    This includes waiting for a slower host.
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
    """Kernels of some calls: name, number of launches, and seconds, over all calls.

    On a CPU, operators instead of kernels.
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
