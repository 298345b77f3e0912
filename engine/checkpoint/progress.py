"""How far a run has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from stampede.engine.checkpoint.states import (
    Count,
    EvaluationsState,
    PlateauState,
    ReaderState,
)


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        epoch: epochs finished.
        reader: state of the `Reader`'s training batches; nothing before the first checkpoint.
        step: steps taken.
        samples: samples trained on.
        train_seconds: time spent in training, without evaluation and checkpoints.
        touched_rows, clipped_rows, skipped_rows: rows of all batches so far, those that were
            clipped, and those left out for a gradient that was not finite.
        skipped_batches: steps whose batch was left out for a loss that was not finite.
        skipped_in_a_row: how many of them are the newest steps.
        best_epoch: epoch with the best AUC on the selecting part, counted from 1; 0 for none.
        best_score: that AUC; None where it is undefined.
        best_auc: AUC on the test part in that epoch.
        waited: evaluated epochs since that were no better.
        plateau, table_plateau: states of the rates of the dense layers and of the tables, see
            `stampede.engine.evaluate.Plateau`.
        logged_losses: newest ones, where these are compared; see `stampede.engine.trainer`.
        selected: evaluations of that epoch, by part; empty in checkpoints of earlier versions.
        last: newest evaluations, by part.
        evaluated_step: step after which they were made.
        metrics_lines: lines of `metrics.jsonl` up to here.
    """

    # What a checkpoint says is not trusted: types are checked, unknown keys refused.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False
    )

    epoch: Count = 0
    reader: ReaderState = field(default_factory=dict)
    step: Count = 0
    samples: Count = 0
    train_seconds: float = 0.0
    touched_rows: Count = 0
    clipped_rows: Count = 0
    skipped_rows: Count = 0
    skipped_batches: Count = 0
    skipped_in_a_row: Count = 0
    best_epoch: Count = 0
    best_score: float | None = None
    best_auc: float | None = None
    waited: Count = 0
    plateau: PlateauState = field(default_factory=dict)
    table_plateau: PlateauState = field(default_factory=dict)
    logged_losses: Annotated[list[float], Field(max_length=1000)] = field(default_factory=list)
    selected: EvaluationsState = field(default_factory=dict)
    last: EvaluationsState = field(default_factory=dict)
    evaluated_step: Count = 0
    metrics_lines: Count = 0

    @property
    def is_epoch_end(self) -> bool:
        """Whether an epoch has been finished, its evaluation included, and no other begun."""
        begun = self.reader.get("samples", 0) > 0
        return not begun and self.reader.get("epoch", self.epoch) == self.epoch
