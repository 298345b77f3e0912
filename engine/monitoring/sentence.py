"""A line of timing for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stampede.engine.console import readable_bytes
from stampede.engine.monitoring.phases import READING


def sentence_of(line: Mapping[str, Any], world_size: int) -> str:
    """For the console.

    Args:
        line: of all ranks, see `together`.
        world_size: number of ranks.
    """
    steps, mean = line["step_seconds"], line["step_seconds"]["mean"]
    parts = [
        f"step {line['step']:,}: p50 {_ms(steps['p50'])}, p90 {_ms(steps['p90'])}, "
        f"p99 {_ms(steps['p99'])}, max {_ms(steps['max'])}",
        f"reading {line['phase_seconds'][READING] / mean:.1%}",
    ]
    if world_size > 1:
        slowest = line["slowest_seconds"]
        parts += [
            f"communication {line['communication_seconds'] / mean:.1%}",
            f"slowest rank {slowest['rank']}: {_ms(slowest['own'])} of its own, the others "
            f"{_ms(slowest['others'])}",
        ]
    return "; ".join([*parts, f"memory {readable_bytes(line['peak_memory_bytes'])}"])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"
