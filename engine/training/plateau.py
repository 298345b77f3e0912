"""What chooses among evaluations; where it no longer rises, rates fall and training stops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stampede.engine.config import Config
from stampede.engine.config.optim import PlateauSection
from stampede.engine.training.progress import Progress

# What each `evaluate.metric` is called.
METRIC_NAMES = {"auc": "AUC", "logloss": "logloss", "both": "AUC minus logloss"}


def selection_score(found: Mapping[str, Any], metric: str) -> float | None:
    """What an evaluation of a part is worth by `evaluate.metric`: higher is better.

    None if it needs an AUC and one class is absent.
    """
    auc, logloss = found["auc"], found["logloss"]
    if metric == "logloss":
        return -logloss
    return auc if auc is None or metric == "auc" else auc - logloss


def stops_early(progress: Progress, config: Config) -> bool:
    """Whether training should stop, as the last epochs brought no improvement."""
    return 0 < config.evaluate.patience <= progress.waited


@dataclass(frozen=True)
class Plateau:
    """State of a rate that is reduced when the selecting score no longer rises.

    Like torch's `ReduceLROnPlateau` with `mode="max"` and `threshold_mode="abs"`, but for a
    fraction of the rate, which itself follows a schedule.
    """

    best: float | None = None
    waited: int = 0
    fraction: float = 1.0

    def after(self, score: float | None, settings: PlateauSection) -> Plateau:
        """The state after an evaluation; an undefined score changes nothing."""
        if score is None:
            return self
        if self.best is None or score > self.best + settings.threshold:
            return Plateau(score, 0, self.fraction)
        if self.waited < settings.patience:
            return Plateau(self.best, self.waited + 1, self.fraction)
        reduced = max(self.fraction * settings.factor, settings.least)
        return Plateau(self.best, 0, min(reduced, self.fraction))


def reduce_rates(progress: Progress, config: Config, score: float | None) -> list[str]:
    """Reduce the rates if they are due after an evaluation; returns lines for the user."""
    optim, lines = config.optim, []
    for what, name, settings in (
        ("dense layers", "plateau", optim.dense.plateau),
        ("tables", "table_plateau", optim.embedding.plateau),
    ):
        before = Plateau(**getattr(progress, name))
        after = before.after(score, settings)
        setattr(progress, name, asdict(after))
        if after.fraction < before.fraction:
            lines.append(
                f"step {progress.step}: no better {METRIC_NAMES[config.evaluate.metric]} on the "
                f"{config.evaluate.select_on} part, the {what} continue with "
                f"{after.fraction:.3g} of their scheduled rate"
            )
    return lines
