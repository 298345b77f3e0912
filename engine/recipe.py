"""The recipe: chooses settings that are not given, from the training part.

Every rule is a function of the number of training rows and of given settings.
`benchmarks/quality.py` compares the results with logistic regression.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stampede.engine.config import Config, check_divides, config_type
from stampede.engine.config.presets import at, below_old_runs
from stampede.engine.console import table
from stampede.models import network

# With fewer steps in an epoch, batches get smaller: AUC was the same from 50 to 200 steps.
_STEPS_PER_EPOCH = 100
_LARGEST_BASE, _SMALLEST_BATCH = 1024, 16
# Larger batches are faster and, with many steps, equally good.
_STEPS_OF_LARGE_BATCHES, _LARGEST_BATCH = 400, 8192

# The L2 is _L2 * fields / rows. For first-order weights, where it counts divided by the square of
# the scale, this matches scikit-learn's best C on samples of Criteo and Avazu, 0.03 to 0.3, with
# l2 = 1 / (2 C rows).
_L2, _FIRST_ORDER_SCALE = 4.0, 4.0

# Rows that a plan assumes if the log's are unknown.
LARGE_LOG = 10_000_000

# On smaller logs, batches of this many hundredths of the log and more get settings of their own,
# found with Adam on Criteo's sample and on synthetic clicks (docs/experiments.md): more epochs,
# beyond 8 hundredths even more, lower betas, and multiples of the rate of dense layers.
_LARGE, _FEW_STEPS = 2, 8
_MORE_EPOCHS = 4
_TABLES_FASTER, _DENSE_SLOWER = 2.0, 0.5

# With many epochs the AUC may stall until the rates have fallen: on Criteo's sample, all 24 epochs
# of 4 steps gain 0.002 over stopping with a patience of 2.
_PATIENCE, _OF_THE_EPOCHS = 2, 1 / 3

# Epochs of logs that have fewer rows than each number.
_EPOCHS = ((1_000_000, 6), (10_000_000, 3), (math.inf, 2))

_WARMUP = 0.2
_DROPOUT, _DROPOUT_BELOW = 0.2, 1_000_000
# These networks learn more slowly and overfit later.
_WITHOUT_HIDDEN_LAYERS = ("lr", "fm")
_WITH_HIDDEN_LAYERS = (
    "deepfm", "wide_deep", "dcn", "dcnv2", "xdeepfm", "dlrm", "finalmlp", "wukong"
)  # fmt: skip

_LR = 1e-3
# Up to this many steps the dense layers' rate is constant. With more it falls with their square
# root, but not below 1e-4. The tables' rate does not fall unless the batch is large, which gains
# 0.02 of AUC on 2 million synthetic rows (docs/experiments.md).
_STEPS_AT_FULL_RATE, _LEAST_LR = 600, 1e-4


@dataclass(frozen=True)
class Choice:
    """A setting that the recipe chose.

    Attributes:
        key: of the configuration, such as `train.batch_size`.
        value: the chosen one.
        reason: why, in a few words.
    """

    key: str
    value: Any
    reason: str


def with_recipe(
    config: Config, rows: int, fields: int, world_size: int, saved: Mapping[str, Any] | None = None
) -> tuple[Config, list[Choice]]:
    """Fill in every key of a configuration that was left to the recipe.

    Args:
        rows: of the training part.
        fields: number of id fields.
        world_size: number of ranks; the batch is a multiple of it.
        saved: configuration of the checkpoint that the run continues; its values are kept.

    Returns:
        The configuration, and the recipe's own choices, without those of `saved` or the user.

    Raises:
        SettingsError: the resulting settings contradict each other.
    """
    values = config.model_dump(mode="json")
    choices = []
    # Runs from before there was a recipe used the paper's values for missing keys.
    before = below_old_runs(dict(saved)) if saved else {}
    log = _Log(values, rows, fields, world_size)
    for key, rule in _RULES.items():
        if not _is_open(values, key):
            continue
        value = at(before, key)
        if value is None:
            value, reason = rule(log)
            # Without a scaling rule, the base batch size only sets the recipe's own rates.
            if key != "optim.scaling.base_batch_size" or config.optim.scaling.rule != "none":
                choices.append(Choice(key, value, reason))
        section, _, name = key.rpartition(".")
        at(values, section)[name] = value
    settled = config_type().model_validate(values)
    check_divides(settled, world_size)
    return settled, choices


def described(choices: Sequence[Choice]) -> str:
    """A line for each chosen setting, with its reason."""
    rows = []
    for choice in choices:
        value = f"{choice.value:.3g}" if isinstance(choice.value, float) else choice.value
        rows.append((f"{choice.key}={value}", choice.reason))
    return "chosen by the recipe; change them with these keys:\n" + table(rows)


def open_keys(config: Config) -> set[str]:
    """Keys that are left to the recipe."""
    values = config.model_dump(mode="json")
    return {key for key in _RULES if _is_open(values, key)}


@dataclass(frozen=True)
class _Log:
    """The inputs of the rules; `values` include those chosen so far."""

    values: dict[str, Any]
    rows: int
    fields: int
    world_size: int

    def at(self, key: str) -> Any:
        return at(self.values, key)

    @property
    def hundredths(self) -> float:
        """The batch, divided by a hundredth of the rows rounded down to a power of two; at least 1.

        Large logs have enough steps, and a period is trained on once, however few its steps are.
        """
        if self.rows >= LARGE_LOG or self.at("data.split") == "periods":
            return 1.0
        hundredth = _power_of_two(self.rows / _STEPS_PER_EPOCH, _SMALLEST_BATCH)
        return max(1.0, self.at("train.batch_size") / hundredth)

    @property
    def is_large(self) -> bool:
        """Whether the batch gets the settings of large batches."""
        return self.hundredths >= _LARGE

    @property
    def longer(self) -> float:
        """How many times longer large batches train and warm up if their epochs have few steps."""
        return round(max(1.0, math.sqrt(self.hundredths / _FEW_STEPS)), 2)

    @property
    def base_steps(self) -> float:
        """Steps of the training at the base batch size; for a large batch, in the usual epochs."""
        epochs = self.usual_epochs if self.is_large else self.at("train.epochs")
        return epochs * self.rows / self.at("optim.scaling.base_batch_size")

    @property
    def usual_epochs(self) -> int:
        """Epochs of batches that are not large."""
        epochs = next(epochs for most, epochs in _EPOCHS if self.rows < most)
        return 2 * epochs if self.at("model.name") in _WITHOUT_HIDDEN_LAYERS else epochs


def _base_batch_size(log: _Log) -> tuple[int, str]:
    largest = _power_of_two(log.rows / _STEPS_PER_EPOCH, _SMALLEST_BATCH, _LARGEST_BASE)
    return largest, f"{log.rows / largest:,.0f} steps an epoch of {log.rows:,} rows"


def _batch_size(log: _Log) -> tuple[int, str]:
    least = min(log.at("optim.scaling.base_batch_size"), _LARGEST_BATCH)
    size = _power_of_two(log.rows / _STEPS_OF_LARGE_BATCHES, least, _LARGEST_BATCH)
    size = max(1, round(size / log.world_size)) * log.world_size
    return size, f"{log.rows / size:,.0f} steps an epoch"


def _epochs(log: _Log) -> tuple[int, str]:
    if log.at("data.split") == "periods":
        return 1, "each period is trained on once"
    if log.is_large:
        steps = math.ceil(log.rows / log.at("train.batch_size"))
        return round(log.usual_epochs * _MORE_EPOCHS * log.longer), f"{steps:,} steps an epoch"
    return log.usual_epochs, f"{log.rows:,} rows"


def _patience(log: _Log) -> tuple[int, str]:
    evaluated = log.at("train.epochs") / log.at("evaluate.every_epochs")
    patience = max(_PATIENCE, math.ceil(_OF_THE_EPOCHS * evaluated))
    return patience, "evaluated epochs without a better AUC end the training"


def _embedding_lr(log: _Log) -> tuple[float, str]:
    if log.is_large:
        return _TABLES_FASTER * _falling_rate(log), _for_steps(log)
    # Rates are constant within a period, and fall from one to the next.
    if log.at("data.split") == "periods":
        return _falling_rate(log), _for_steps(log)
    return _LR, f"at batch size {log.at('optim.scaling.base_batch_size'):,}"


def _dense_lr(log: _Log) -> tuple[float, str]:
    slower = _DENSE_SLOWER if log.is_large else 1.0
    return max(slower * _falling_rate(log), _LEAST_LR), _for_steps(log)


def _for_steps(log: _Log) -> str:
    base = log.at("optim.scaling.base_batch_size")
    return f"for {log.base_steps:,.0f} steps of batch size {base:,}"


def _betas(log: _Log) -> tuple[list[float], str]:
    """Averages over fewer steps for larger batches, as their gradients are less noisy.

    After arXiv 2205.10287: 1 - beta grows with the batch.
    """
    if not log.is_large:
        return [0.9, 0.999], "Adam's"
    first = 1 - round(0.1 * (4 * log.hundredths) ** (1 / 3), 1)
    second = 1 - float(f"{0.004 * log.hundredths:.2g}")
    return [max(0.0, round(first, 1)), max(0.5, round(second, 4))], "for few steps"


def _warmup(key: str, usual: float, paper: float) -> Callable[[_Log], tuple[float, str]]:
    def rule(log: _Log) -> tuple[float, str]:
        epochs = usual
        if log.at("preset") == "paper":
            # The preset leaves it open if it must be written in steps.
            epochs = paper
        elif log.is_large:
            epochs = min(log.longer, log.at("train.epochs") / 4)
        if log.at(f"{key}.unit") == "steps":
            steps = round(epochs * log.rows / log.at("train.batch_size"))
            return steps, f"{epochs:g} epochs, in steps"
        return epochs, "epochs"

    return rule


def _embedding_l2(log: _Log) -> tuple[float, str]:
    return _L2 * log.fields / log.rows, f"{_L2:g} x {log.fields} fields / rows"


def _decay(log: _Log) -> tuple[str, str]:
    if log.at("data.split") == "periods":
        return "constant", "another period may follow"
    return "polynomial", "a straight line to 0 at the end of training"


def _first_order_scale(log: _Log) -> tuple[float, str]:
    if not network(log.at("model.name")).first_order:
        return 1.0, f"{log.at('model.name')} has no first-order term"
    return _FIRST_ORDER_SCALE, "4 times the rate and 1/16 of the L2 for first-order weights"


def _dropout(log: _Log) -> tuple[float, str]:
    if log.at("model.name") not in _WITH_HIDDEN_LAYERS:
        return 0.0, f"{log.at('model.name')} is not known to have hidden layers"
    if log.rows >= _DROPOUT_BELOW:
        return 0.0, f"{_DROPOUT_BELOW:,} rows and more"
    return _DROPOUT, f"fewer than {_DROPOUT_BELOW:,} rows"


# In order: each rule depends only on keys before its own.
_RULES: dict[str, Callable[[_Log], tuple[Any, str]]] = {
    "optim.scaling.base_batch_size": _base_batch_size,
    "train.batch_size": _batch_size,
    "train.epochs": _epochs,
    "evaluate.patience": _patience,
    "optim.scaling.rule": lambda _: ("sqrt_star", "rates by the root of the batch, the same L2"),
    "optim.embedding.lr": _embedding_lr,
    "optim.embedding.betas": _betas,
    "optim.embedding.l2": _embedding_l2,
    "optim.embedding.schedule.warmup": _warmup("optim.embedding.schedule", 0.0, 0.0),
    "optim.embedding.schedule.decay": _decay,
    "optim.dense.lr": _dense_lr,
    "optim.dense.betas": _betas,
    "optim.dense.schedule.warmup": _warmup("optim.dense.schedule", _WARMUP, 1.0),
    "optim.dense.schedule.decay": _decay,
    "model.first_order_scale": _first_order_scale,
    "model.dropout": _dropout,
}


def _falling_rate(log: _Log) -> float:
    falling = math.sqrt(_STEPS_AT_FULL_RATE / max(log.base_steps, _STEPS_AT_FULL_RATE))
    return max(_LR * falling, _LEAST_LR)


def _power_of_two(size: float, least: int, most: float = math.inf) -> int:
    """The largest power of two up to `size`, from `least` to `most`."""
    return int(min(max(2 ** int(math.log2(max(size, 1))), least), most))


def _is_open(values: Mapping[str, Any], key: str) -> bool:
    section, _, name = key.rpartition(".")
    return (at(values, section) or {}).get(name, "absent") is None
