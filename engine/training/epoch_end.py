"""The end of an epoch: whether it is evaluated, the best epoch so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tqdm.auto import tqdm

from stampede.engine.advice import on_first_epoch, tell
from stampede.engine.config import Config
from stampede.engine.console import readable_metric
from stampede.engine.training.plateau import METRIC_NAMES, selection_score, stops_early
from stampede.engine.training.training_run import TrainingRun


def is_evaluated(epoch: int, config: Config) -> bool:
    """Whether an epoch, counted from 1, ends with an evaluation; the last one does."""
    return epoch % config.evaluate.every_epochs == 0 or epoch == config.train.epochs


def finish_epoch(
    run: TrainingRun, epoch: int, evaluate: Callable[[], dict[str, dict[str, Any]]]
) -> None:
    """Evaluate after an epoch, counted from 1, note whether it is the best one, and say so."""
    progress, config = run.progress, run.config
    # Evaluate before saving: weights may have diverged in the last step.
    results, selecting, metric = evaluate(), config.evaluate.select_on, config.evaluate.metric
    progress.epoch = epoch
    score, best = selection_score(results[selecting], metric), progress.best_score
    # If the part has only one class, its AUC is undefined and the last epoch is the best.
    if best is None or score > best:
        progress.best_epoch, progress.best_score = epoch, score
        progress.best_auc, progress.selected = results["test"]["auc"], results
        progress.waited = 0
    else:
        progress.waited += 1
    said = [
        f"{part} AUC {readable_metric(found['auc'])} logloss {found['logloss']:.4f}"
        for part, found in results.items()
    ]
    said = [f"epoch {epoch}: {', '.join(said)}"]
    if stops_early(progress, config) and epoch < config.train.epochs:
        said.append(
            f"stopping early: no better {METRIC_NAMES[metric]} on the {selecting} part since "
            f"epoch {progress.best_epoch}"
        )
    if run.processes.is_main:
        tqdm.write("\n".join(said))
    if epoch == min(config.evaluate.every_epochs, config.train.epochs):
        said = on_first_epoch(selecting, results[selecting]["auc"], epoch)
        tell(said, progress.step, run.folder, run.processes)
        progress.metrics_lines = run.folder.metrics_lines
