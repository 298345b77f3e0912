"""Times contenders that take turns, and parts of their work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest import mock


def interleaved(
    contenders: Mapping[str, Callable[[], float]], repeats: int
) -> dict[str, list[float]]:
    """Let contenders take turns, so that other load affects all alike.

    Args:
        contenders: calls by name; each returns its own seconds.
        repeats: counted calls of each, after one warm-up call.

    Returns:
        Seconds of the counted calls.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for name, contender in contenders.items():
            taken = contender()
            if repeat:
                seconds[name].append(taken)
    return seconds


def seconds_of(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Stopwatch:
    """Adds up the time of functions while a program runs.

    Time in nested watched functions counts for both.

    Attributes:
        seconds: by name.
        calls: by name.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    @contextmanager
    def watching(
        self, owner: Any, attribute: str, name: str | Callable[..., str]
    ) -> Iterator[None]:
        """Time `owner.attribute` inside the context.

        Args:
            owner: module, class or object.
            name: under which its time is added, or a function of the arguments that returns it.
        """
        watched = getattr(owner, attribute)

        @wraps(watched)
        def call(*arguments: Any, **options: Any) -> Any:
            key = name if isinstance(name, str) else name(*arguments, **options)
            start = time.perf_counter()
            try:
                return watched(*arguments, **options)
            finally:
                taken = time.perf_counter() - start
                self.seconds[key] = self.seconds.get(key, 0.0) + taken
                self.calls[key] = self.calls.get(key, 0) + 1

        with mock.patch.object(owner, attribute, call):
            yield

    def reset(self) -> None:
        """Reset all times and counts."""
        self.seconds.clear()
        self.calls.clear()
