"""Seconds on a device that works through a queue."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch


def seconds_until_done(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call and of everything that it queued; nothing else is queued before."""
    _drain(device)
    start = time.perf_counter()
    call()
    _drain(device)
    return time.perf_counter() - start


def device_seconds(calls: list[Callable[[], Any]], device: torch.device) -> list[float]:
    """Seconds that the device takes for each of some calls, one after the other."""
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


def _drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
