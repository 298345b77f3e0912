"""Times contenders that take turns, and parts of their work."""

from __future__ import annotations

import time
from collections import Counter
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
    """
    turns = [{name: call() for name, call in contenders.items()} for _ in range(repeats + 1)]
    return {name: [turn[name] for turn in turns[1:]] for name in contenders}


def seconds_of(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Stopwatch:
    """Adds up the time and the calls of functions, by name, while a program runs.

    Time in nested watched functions counts for both.
    """

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    @contextmanager
    def watching(
        self, owner: Any, attribute: str, name: str | Callable[..., str]
    ) -> Iterator[None]:
        """Time `owner.attribute` within the context, under a name or a name of the arguments."""
        watched = getattr(owner, attribute)

        @wraps(watched)
        def call(*arguments: Any, **options: Any) -> Any:
            key = name if isinstance(name, str) else name(*arguments, **options)
            start = time.perf_counter()
            try:
                return watched(*arguments, **options)
            finally:
                self.seconds[key] += time.perf_counter() - start
                self.calls[key] += 1

        with mock.patch.object(owner, attribute, call):
            yield
