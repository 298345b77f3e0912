"""How long steps took, and which rank the others waited for, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from stampede.engine.console import readable_bytes
from stampede.engine.pulse import READING
from stampede.engine.report.run_records import RunRecord

_HEADER = (
    "run", "steps", "p50", "p90", "p99", "longest", "reading", "communication", "slowest rank",
    "peak memory",
)  # fmt: skip


def step_time_table(runs: Sequence[RunRecord]) -> tuple[list[str], list[list[str]]]:
    """Header, and a row for each run whose steps were timed: its longest stretch, the latest."""
    timed = [(run, run.of_kind("timing")) for run in runs]
    return list(_HEADER), [_row(run.label, lines) for run, lines in timed if lines]


def _row(label: str, lines: Sequence[dict[str, Any]]) -> list[str]:
    line = max(lines, key=lambda line: (line["step_seconds"]["steps"], line["step"]))
    seconds, mean = line["step_seconds"], line["step_seconds"]["mean"]
    first = line["step"] - seconds["steps"] + 1
    return [
        label,
        f"{first:,} to {line['step']:,}",
        *(f"{1e3 * seconds[name]:,.1f} ms" for name in ("p50", "p90", "p99", "max")),
        f"{line['phase_seconds'][READING] / mean:.1%}",
        f"{line['communication_seconds'] / mean:.1%}",
        _slowest(lines),
        readable_bytes(line["peak_memory_bytes"]),
    ]


def _slowest(lines: Sequence[dict[str, Any]]) -> str:
    """The rank that was the slowest most often, and how often; nothing for a single one."""
    several = [line["slowest_seconds"] for line in lines if line["slowest_seconds"]["others"]]
    if not several:
        return ""
    rank, often = Counter(found["rank"] for found in several).most_common(1)[0]
    own, others = (
        sum(found[name] for found in several if found["rank"] == rank) / often
        for name in ("own", "others")
    )
    return (
        f"{rank}, {often:,} of {len(several):,} times: {1e3 * own:,.1f} ms of its own, the others "
        f"{1e3 * others:,.1f} ms"
    )
