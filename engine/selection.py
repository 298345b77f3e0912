"""What evaluations decide: the best epoch, an early stop, lower learning rates.

All ranks have the same evaluations, so they decide alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stampede.engine.checkpoint import Progress
from stampede.engine.config import Config, EvaluateSection
from stampede.engine.config.optim import PlateauSection
from stampede.engine.evaluate import Evaluation


@dataclass(frozen=True)
class Plateau:
    """State of a rate that is reduced when the AUC no longer rises.

    As torch's `ReduceLROnPlateau` with `mode="max"` and `threshold_mode="abs"`, but of a fraction,
    since the rate itself follows a schedule.

    Attributes:
        best: highest AUC so far.
        waited: evaluations since that were no better.
        fraction: of the scheduled rate.
    """

    best: float | None = None
    waited: int = 0
    fraction: float = 1.0

    def after(self, score: float | None, settings: PlateauSection) -> Plateau:
        """The state after an evaluation; an AUC that is undefined changes nothing."""
        if score is None:
            return self
        if self.best is None or score > self.best + settings.threshold:
            return Plateau(score, 0, self.fraction)
        if self.waited < settings.patience:
            return Plateau(self.best, self.waited + 1, self.fraction)
        reduced = max(self.fraction * settings.factor, settings.least)
        return Plateau(self.best, 0, min(reduced, self.fraction))


def is_evaluated(epoch: int, config: Config) -> bool:
    """Whether an epoch, counted from 1, ends with an evaluation; the last one does."""
    return epoch % config.evaluate.every_epochs == 0 or epoch == config.train.epochs


def choose(progress: Progress, results: Mapping[str, Evaluation], select_on: str) -> None:
    """Remember the epoch just finished if it is the best so far."""
    score, best = results[select_on].auc, progress.best_score
    # Where the part holds one class only, its AUC is undefined and the last epoch counts.
    if best is None or score > best:
        progress.best_epoch = progress.epoch
        progress.best_score = score
        progress.best_auc = results["test"].auc
        progress.selected = {part: result.as_dict() for part, result in results.items()}
        progress.waited = 0
    else:
        progress.waited += 1


def stops_early(progress: Progress, settings: EvaluateSection) -> bool:
    """Whether training is to stop, as the last epochs were no better than the best one."""
    return 0 < settings.patience <= progress.waited
