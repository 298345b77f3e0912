"""What a checkpoint says of the reader and of the plateau, checked before it is used."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, model_validator

from stampede.data import Order
from stampede.data.prepared.manifest import Count
from stampede.settings import Section, Seed


class _Order(Section):
    """See `stampede.data.Order`."""

    rows: Count
    shuffle: Literal["global", "block", "none"]
    seed: Seed
    window_rows: Count
    block_rows: Count

    @model_validator(mode="after")
    def _is_an_order(self) -> _Order:
        Order(**self.model_dump())
        return self


class _Settings(Section):
    """Settings that the order depends on, see `stampede.engine.reading.Reader`."""

    shuffle: str = ""
    memory_gb: float = 0.0


class _Reader(Section):
    """See `stampede.data.GlobalBatches.state_dict`; what is absent is refused where it is used."""

    epoch: Count = 0
    samples: Count = 0
    batch_size: Count = 0
    order: _Order | None = None
    settings: _Settings | None = None


class _Plateau(Section):
    """See `stampede.engine.selection.Plateau`."""

    best: float | None = None
    waited: Count = 0
    fraction: float = 1.0


class _Grouped(Section):
    """See `stampede.engine.metrics.PartMetrics.result`."""

    gauc: float | None
    gauc_groups: Count
    gauc_left_out: Count
    gauc_unknown_samples: Count


class _Evaluation(Section):
    """See `stampede.engine.evaluate.Evaluation`."""

    auc: float | None
    logloss: float
    attainable_auc: float | None
    samples: Count
    pr_auc: float | None = None
    normalized_entropy: float | None = None
    calibration: float | None = None
    calibration_buckets: list[dict[str, float | None]] | None = None


def _is_evaluation(values: dict[str, Any]) -> dict[str, Any]:
    """Those of groups are all there or none; before the first evaluation there is nothing."""
    grouped = {name: values[name] for name in _Grouped.model_fields if name in values}
    if values:
        _Evaluation.model_validate({k: v for k, v in values.items() if k not in grouped})
    if grouped:
        _Grouped.model_validate(grouped)
    return values


def _by_part(values: Any) -> Any:
    """Earlier versions kept the evaluation of the test part alone."""
    return {"test": values} if isinstance(values, dict) and "auc" in values else values


def _checked_as(section: type[Section]) -> AfterValidator:
    """A mapping that stays one, once it could be read as such a section."""

    def check(values: dict[str, Any]) -> dict[str, Any]:
        section.model_validate(values)
        return values

    return AfterValidator(check)


ReaderState = Annotated[dict[str, Any], _checked_as(_Reader)]
PlateauState = Annotated[dict[str, Any], _checked_as(_Plateau)]
# By part.
EvaluationsState = Annotated[
    dict[str, Annotated[dict[str, Any], AfterValidator(_is_evaluation)]], BeforeValidator(_by_part)
]
