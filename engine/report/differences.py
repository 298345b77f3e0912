"""In which keys of the configuration runs differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stampede.engine.report.run_records import RunRecord

_ABSENT = "-"


def differing_keys(runs: Sequence[RunRecord]) -> list[str]:
    """Dotted keys that do not have one value in all runs, in the order of the configuration."""
    keys = dict.fromkeys(key for run in runs for key in run.compared)
    return [
        key for key in keys if len({readable(run.compared.get(key, _ABSENT)) for run in runs}) > 1
    ]


def difference_table(runs: Sequence[RunRecord]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a run each, a column for each key in which runs differ."""
    keys = differing_keys(runs)
    rows = [[run.label, *(readable(run.compared.get(k, _ABSENT)) for k in keys)] for run in runs]
    return ["run", *keys], rows


def readable(value: Any) -> str:
    """A value of a configuration, as YAML would have it on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(readable, value)) + "]"
    return str(value)
