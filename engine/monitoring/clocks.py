"""What time is taken with: the host's clock, or events on a GPU's stream."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes marks and tells the seconds between them."""

    def mark(self) -> Any:
        """Now."""

    def seconds(self, first: Any, last: Any) -> float:
        """From one mark that is settled to another."""

    def is_settled(self, mark: Any) -> bool:
        """Whether the seconds up to a mark are known."""

    def settle(self, mark: Any) -> None:
        """Wait until they are."""


class HostClock:
    """That of the process, which on a CPU is the one that computes."""

    mark = staticmethod(time.perf_counter)

    def seconds(self, first: float, last: float) -> float:
        """From one mark to another."""
        return last - first

    def is_settled(self, mark: float) -> bool:
        """At once."""
        return True

    def settle(self, mark: float) -> None:
        """Nothing to wait for."""


class StreamClock:
    """Events on the stream that a GPU trains on: when it gets there, not when the host does.

    The host runs ahead of the GPU. Time in which the stream has nothing to do, as the host is late,
    counts for what the host was late with.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)

    def mark(self) -> torch.cuda.Event:
        """When all that was queued so far is done."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        """From one mark that is settled to another."""
        return first.elapsed_time(last) / 1e3

    def is_settled(self, mark: torch.cuda.Event) -> bool:
        """Without a wait for it."""
        return mark.query()

    def settle(self, mark: torch.cuda.Event) -> None:
        """Wait for the stream to get there."""
        mark.synchronize()


def clock_of(device: torch.device) -> Clock:
    """What tells the time of a device."""
    return StreamClock(device) if device.type == "cuda" else HostClock()
