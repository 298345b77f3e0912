"""Other models on the features of a run, and what is said if one of them is better."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, NamedTuple

from tqdm import tqdm

from stampede.data import Dataset
from stampede.engine.advice import tell
from stampede.engine.boosted_trees import boosted_trees
from stampede.engine.config import Config
from stampede.engine.console import progress_bar
from stampede.engine.logistic_regression import logistic_regression
from stampede.engine.processes import Processes
from stampede.engine.results.run_folder import RunFolder
from stampede.engine.training.progress import Progress
from stampede.files import read_json
from stampede.settings import DAMAGE, SettingsError

_LARGEST_LOSS = 0.002
# As many as small logs often need with falling rates.
_ENOUGH_EPOCHS = 6

# Training rows, and rows of all tables, up to which `auto` compares.
_MOST_TRAINING_ROWS = 1_000_000
_MOST_TABLE_ROWS = 100_000_000


class Baseline(NamedTuple):
    """Another model.

    Attributes:
        setting: of `evaluate`, whether it is fitted.
        title: as the run calls it.
        fit: its result on a data set, see `logistic_regression`; None if there is none.
    """

    setting: str
    title: str
    fit: Callable[[Dataset, Callable[[], object]], dict[str, Any] | None]


# By key of the summary.
BASELINES = {
    "logistic_regression": Baseline("compare_with_lr", "logistic regression", logistic_regression),
    "boosted_trees": Baseline("compare_with_trees", "LightGBM", boosted_trees),
}


def check_installed(config: Config) -> None:
    """Refuse a comparison that is asked for and cannot be made."""
    if config.evaluate.compare_with_trees is True and find_spec("lightgbm") is None:
        raise SettingsError(
            "evaluate.compare_with_trees: found true, but LightGBM is not installed; write "
            "`pip install lightgbm`, or leave the key out"
        )


def fit_baseline(key: str, dataset: Dataset, processes: Processes) -> dict[str, Any] | None:
    """Its result on rank 0; None if there is none; all ranks must call it."""
    baseline = BASELINES[key]

    def fit() -> dict[str, Any] | None:
        bar = progress_bar(None, 0, True, baseline.title, "fits", delay=5.0)
        with bar:
            try:
                return baseline.fit(dataset, bar.update)
            except ValueError as failure:
                tqdm.write(f"no comparison with {baseline.title}: {failure}")
        return None

    if dataset.goals:
        return None
    with processes.heartbeat.slowly(f"comparing with {baseline.title}"):
        return processes.on_main(fit)


def compare(
    config: Config,
    dataset: Dataset,
    progress: Progress,
    folder: RunFolder,
    processes: Processes,
    known: Mapping[str, dict[str, Any] | None],
    *,
    same_data: bool,
) -> dict[str, dict[str, Any] | None]:
    """Fit each baseline on rank 0, unless the run did so before; all ranks must call it.

    Args:
        dataset: its parts must be on the CPU.
        known: results that are known.
        same_data: whether an existing summary in the folder is about the same data.

    Returns:
        Its result by key of the summary; None for one that is not compared with.
    """
    few_ids = sum(dataset.tables.values()) <= _MOST_TABLE_ROWS
    is_small = dataset.train.rows <= _MOST_TRAINING_ROWS and few_ids
    part, results = config.evaluate.select_on, {}
    for key, baseline in BASELINES.items():
        found, asked = known.get(key), getattr(config.evaluate, baseline.setting)
        wanted = is_small and config.evaluate.compare_with_lr if asked == "auto" else asked
        results[key] = None
        if dataset.goals or not wanted:
            continue

        def earlier(key: str = key) -> dict[str, Any] | None:
            # The result of the run before it was continued.
            with suppress(*DAMAGE):
                return read_json(folder.summary)[key]
            return None

        if found is None and same_data:
            found = processes.on_main(earlier)
        if found is None:
            found = fit_baseline(key, dataset, processes)
        if found is not None:
            sentences = on_baseline(part, progress, found, baseline.title)
            tell(sentences, progress.step, folder, processes)
        results[key] = found
    return results


def on_baseline(part: str, progress: Progress, found: Mapping[str, Any], title: str) -> list[str]:
    """Advice if a baseline is better on the part that selected the best epoch."""
    ours, other = progress.selected.get(part, {}).get("auc"), found.get(f"{part}_auc")
    if ours is None or other is None or ours >= other - _LARGEST_LOSS:
        return []
    more = f"more epochs (train.epochs={_ENOUGH_EPOCHS}), " if progress.epoch <= 2 else ""
    return [
        f"the best {part} AUC {ours:.4f} is below that of {title}, {other:.4f}: try {more}other "
        "rates (optim.embedding.lr, optim.dense.lr) or another optim.embedding.l2; `stampede tune` "
        "searches for them"
    ]
