"""What a run records: the types of `summary.json` and of the lines of `metrics.jsonl`.

Files may be damaged or edited; a number that is text would surface anywhere later.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Number = float | None


class _Recorded(BaseModel):
    """Other keys may have any value; numbers are finite."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _Bucket(_Recorded):
    mean_prediction: float
    mean_label: float


class _Metrics(_Recorded):
    """Metrics of a part; `auc` is null if one class is absent."""

    auc: Number
    logloss: Number = None
    pr_auc: Number = None
    normalized_entropy: Number = None
    calibration: Number = None
    gauc: Number = None
    attainable_auc: Number = None
    calibration_buckets: list[_Bucket] | None = None
    goals: dict[str, _Metrics] | None = None


class _Line(_Recorded):
    kind: str
    step: int


class _Evaluation(_Metrics, _Line):
    part: str
    train_seconds: Number


class _Train(_Line):
    epoch: int = 1
    loss: Number
    clipped_share: Number = None


class _Stopped(_Line):
    reason: str


class _Advice(_Line):
    text: str


class _Timing(_Line):
    step_seconds: dict[str, Number]
    phase_seconds: dict[str, float]
    communication_seconds: float
    slowest_seconds: dict[str, Number]
    peak_memory_bytes: int


class _Period(_Line):
    """An evaluation of a period's file before it was trained on."""

    period: int
    file: str
    auc: Number = None
    logloss: Number = None
    ids: int = 0


_LINES: dict[str, type[_Line]] = {
    "advice": _Advice, "evaluation": _Evaluation, "period": _Period,
    "stopped": _Stopped, "timing": _Timing, "train": _Train,
}  # fmt: skip


class _Last(_Recorded):
    epoch: int
    test: _Metrics
    validation: _Metrics | None = None


class _Summary(_Metrics):
    validation: _Metrics | None = None
    last: _Last
    best_epoch: int | None
    selected_on: Literal["validation", "test"]
    samples_per_second: Number
    train_seconds: float
    clipped_share: Number = None
    steps: int
    epochs: int
    rows: dict[str, int] = {}
    ids: int | None = None
    parameters: dict[str, int] = {}
    device: str = ""
    version: str = ""
    end_time: str = ""


def check_line(line: Any) -> dict[str, Any]:
    """A line of `metrics.jsonl`; a ValueError if values have wrong types."""
    kind = line.get("kind") if isinstance(line, dict) else None
    _LINES.get(kind, _Line).model_validate(line)
    return line


def check_summary(summary: Any) -> dict[str, Any]:
    """The content of `summary.json`; a ValueError if values have wrong types."""
    _Summary.model_validate(summary)
    return summary
