"""How far a run is; a checkpoint holds it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import ConfigDict

from stampede.data.prepared.manifest import Count


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
        epoch: epochs finished.
        reader: state of the `Reader`'s training batches; empty before the first checkpoint.
        train_seconds: without evaluation and checkpoints.
        touched_rows, clipped_rows, skipped_rows: over all batches so far: rows with a gradient,
            rows that were clipped, rows skipped because their gradient was not finite.
        skipped_batches: batches skipped because their loss was not finite.
        best_epoch: epoch with the best score on the selecting part, from 1; 0 for none.
        best_score: that score, see `selection_score`; None if it is undefined.
        best_auc: AUC on the test part in that epoch.
        waited: evaluations since then without a better score.
        plateau, table_plateau: see `stampede.engine.training.plateau.Plateau`.
        selected, last: evaluations of the best epoch and the newest ones, by part.
        evaluated_step: the step of the newest ones.
        calibration: scale and shift of each goal's logits, see `LogitCalibration`; empty for none.
        metrics_lines: lines of `metrics.jsonl` so far.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False
    )

    epoch: Count = 0
    reader: dict[str, Any] = field(default_factory=dict)
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
    plateau: dict[str, Any] = field(default_factory=dict)
    table_plateau: dict[str, Any] = field(default_factory=dict)
    selected: dict[str, dict[str, Any]] = field(default_factory=dict)
    last: dict[str, dict[str, Any]] = field(default_factory=dict)
    evaluated_step: Count = 0
    calibration: list[list[float]] = field(default_factory=list)
    metrics_lines: Count = 0

    @property
    def updates(self) -> int:
        """Updates of the model so far: steps whose batch was not skipped."""
        return self.step - self.skipped_batches

    @property
    def clipped_share(self) -> float | None:
        """Share of the batches' rows that were clipped; None if the optimizer does not count."""
        return self.clipped_rows / self.touched_rows if self.touched_rows else None

    def has_ended(self, epoch: int) -> bool:
        """Whether all batches of an epoch, from 0, are trained on: the reader is in the next."""
        return self.reader.get("epoch", epoch) > epoch

    @property
    def is_epoch_end(self) -> bool:
        """Whether an epoch has just ended, its evaluation included."""
        return not self.reader.get("samples") and not self.has_ended(self.epoch)
