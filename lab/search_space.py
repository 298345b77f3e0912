"""What `stampede tune` searches: a configuration's open keys, around the values it had."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stampede import Run, stores
from stampede.data import Vocabulary, load_schema, usual_min_count

if TYPE_CHECKING:
    import optuna

# By factor of the recipe, the key whose value it multiplies, and a range. A fixed value suits only
# as many rows as the trials have.
_FACTORS = {
    "recipe.table_lr": ("optim.embedding.lr", 0.3, 10.0),
    "recipe.dense_lr": ("optim.dense.lr", 0.3, 5.0),
    "recipe.l2": ("optim.embedding.l2", 0.05, 10.0),
}
_EPOCHS = (0.5, 1.0, 2.0)
# On smaller logs the recipe trains until evaluations are no longer better, in up to this many
# epochs: a higher limit changes little, but with few epochs the rates fall.
SMALL_LOG, _UNTIL_NO_BETTER, _FEW_EPOCHS = 1_000_000, 20, 6
# There a half and twice the first trial's batch are tried.
_BATCHES = (1, 2, 4)
# The first trial's network may be replaced by those of its group.
_NETWORKS = (("deepfm", "dcnv2", "fm", "lr"), ("mmoe", "ple", "shared_bottom"), ("din", "dcnv2"))
_WITHOUT_DROPOUT = ("fm", "lr")
_DROPOUTS = (0.0, 0.1, 0.2, 0.4)
# Larger embeddings at first learn products of ids faster (docs/experiments.md).
_INIT_STDS = {0.01, 0.1}
# On small logs, which are soon prepared anew.
_MIN_COUNTS = {1, 2, 5}

# Columns of the table, by key, with their widths. Trials change one key each in this order.
COLUMNS = {
    "recipe.table_lr": ("table lr x", 11),
    "optim.embedding.lr": ("table lr", 9),
    "recipe.l2": ("l2 x", 6),
    "optim.embedding.l2": ("table l2", 9),
    "model.name": ("network", 14),
    "recipe.epochs": ("epochs x", 9),
    "train.epochs": ("epochs", 7),
    "recipe.dense_lr": ("dense lr x", 11),
    "optim.dense.lr": ("dense lr", 9),
    "model.dropout": ("dropout", 8),
    "model.init_std": ("init_std", 9),
    "train.batch_size": ("batch", 6),
    "data.min_count": ("min_count", 10),
}


@dataclass(frozen=True)
class Parameter:
    """What a search may choose for a key: some values, or a range on a logarithmic scale."""

    choices: Sequence[Any] = ()
    low: float = 0.0
    high: float = 0.0

    def suggest(self, trial: optuna.Trial, key: str) -> None:
        """Let an Optuna trial choose a value."""
        if self.choices:
            trial.suggest_categorical(key, self.choices)
        else:
            trial.suggest_float(key, self.low, self.high, log=True)


def open_parameters(given: Mapping[str, Any], run: Run) -> dict[str, Parameter]:
    """What to search, by key: what `given` leaves open, around the values that `run` had."""
    is_small = training_rows(run) < SMALL_LOG
    parameters: dict[str, Parameter] = {}
    has_recipe = run.config.preset == "auto"
    for factor, (key, low, high) in _FACTORS.items():
        if not is_open(given, key):
            continue
        if has_recipe:
            parameters[factor] = Parameter(low=low, high=high)
        elif usual := value_of(run.config, key):
            parameters[key] = Parameter(low=low * usual, high=high * usual)
    epochs = value_of(run.config, "train.epochs")
    if is_small and epochs == _UNTIL_NO_BETTER:
        parameters["train.epochs"] = Parameter(choices=[_FEW_EPOCHS, epochs])
    elif is_small or not has_recipe:
        parameters["train.epochs"] = Parameter(choices=[factor * epochs for factor in (1, 2, 4)])
    elif is_open(given, "train.epochs"):
        parameters["recipe.epochs"] = Parameter(choices=_EPOCHS)
    if is_small:
        usual = value_of(run.config, "train.batch_size")
        sizes = {usual, *(max(1, usual // 2) * factor for factor in _BATCHES)}
        parameters["train.batch_size"] = Parameter(choices=sorted(sizes))
        is_whole = training_rows(run) != getattr(run.config.data, "train_rows", None)
        if is_whole and _leaves_counts_open(run.config.data):
            others = _MIN_COUNTS - {usual_min_count(training_rows(run))}
            parameters["data.min_count"] = Parameter(choices=[None, *sorted(others)])
    used = value_of(run.config, "model.name")
    others = next((group for group in _NETWORKS if used in group), ())
    parameters["model.name"] = Parameter(choices=list(dict.fromkeys([used, *others])))
    dropouts = sorted({value_of(run.config, "model.dropout"), *_DROPOUTS})
    parameters["model.dropout"] = Parameter(choices=dropouts)
    stds = sorted({value_of(run.config, "model.init_std"), *_INIT_STDS})
    parameters["model.init_std"] = Parameter(choices=stds)
    return {key: parameters[key] for key in COLUMNS if key in parameters and is_open(given, key)}


def _leaves_counts_open(data: Any) -> bool:
    """Whether `data.min_count` would change a field."""
    if data.kind != "table" or data.features != "auto":
        return getattr(data, "features", None) == "auto"
    fields = load_schema(stores.fetched(data.schema_file)).ids.values()
    return any(isinstance(field, Vocabulary) and field.min_count is None for field in fields)


def changes_of_one(
    parameters: Mapping[str, Parameter], usual: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Changes of one key each: its other choices, or half of the way to the ends of its range."""
    for key, what in parameters.items():
        others = what.choices or [math.sqrt(end * usual[key]) for end in (what.high, what.low)]
        yield from ({key: other} for other in others if other != usual[key])


def training_rows(run: Run) -> int:
    """Of a run that has ended."""
    return run.summary["rows"]["train"]


def value_of(config: Any, key: str) -> Any:
    """The value of a `section.key`."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def is_open(given: Any, key: str) -> bool:
    """Whether a configuration leaves a key out."""
    for part in key.split("."):
        given = given.get(part) if isinstance(given, dict) else None
    return given is None


def choose(trial: optuna.Trial, parameters: Mapping[str, Parameter], network: str) -> None:
    """Let Optuna choose; without a choice of it, the network is the one that is named."""
    for key, what in parameters.items():
        if key == "model.dropout" and trial.params.get("model.name", network) in _WITHOUT_DROPOUT:
            continue
        what.suggest(trial, key)
