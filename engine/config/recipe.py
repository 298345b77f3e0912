"""The recipe: chooses settings that are not given, from the training part.

Every rule is a function of the number of training rows and of given settings.
`benchmarks/quality.py` compares the results with logistic regression.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

from stampede.engine.config import Config, check_divides, config_type
from stampede.engine.config.data import LARGE_LOG
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
# l2 = 1 / (2 C rows). A short training needs less: it ends before it overfits
# (docs/experiments.md).
_L2, _L2_OF_SHORT, _FIRST_ORDER_SCALE = 4.0, 1.0, 4.0

# On smaller logs, batches of this many hundredths of the log and more get settings of their own,
# found with Adam on Criteo's sample and on synthetic clicks (docs/experiments.md): more epochs
# and lower betas, both more so beyond 8 hundredths, and multiples of the rate of dense layers.
_LARGE, _FEW_STEPS = 2, 8
_MORE_EPOCHS = 4
_TABLES_FASTER, _DENSE_SLOWER = 2.0, 0.5

# With many epochs the AUC may stall until the rates have fallen: on Criteo's sample, all 24 epochs
# of 4 steps gain 0.002 over stopping with a patience of 2.
_PATIENCE, _OF_THE_EPOCHS = 2, 1 / 3

# Epochs of logs that have fewer rows than each number.
SMALL_LOG = 1_000_000
_EPOCHS = ((SMALL_LOG, 6), (10_000_000, 3), (math.inf, 2))

# Small logs need 1 to 20 epochs and more, which no rule on their rows foretells. They train until
# the validation part no longer gains, with constant rates, and the mean of each epoch's weights
# takes out the noise that falling rates would (docs/experiments.md).
_MOST_EPOCHS, _SNAPSHOTS, _SHORT_PATIENCE, _FASTER = 20, 8, 3, 2.0

# The periods of a small log have no validation part, and begin anew on all rows so far. On Avazu's
# days 5 to 12 epochs are equally good, on MovieLens' the logloss rises from 3 on
# (docs/experiments.md).
_EPOCHS_ANEW = 5

# Logistic regression has one minimum, which constant rates only circle. Rates that fall from this
# one come within 0.001 of L-BFGS' AUC in so many epochs (docs/experiments.md).
_EPOCHS_OF_LR, _LR_OF_LR = 20, 5e-3

_WARMUP = 0.2
_DROPOUT, _DROPOUT_BELOW = 0.2, 1_000_000
# These networks learn more slowly and overfit later.
_WITHOUT_HIDDEN_LAYERS = ("lr", "fm")
_WITH_HIDDEN_LAYERS = (
    "deepfm", "wide_deep", "dcn", "dcnv2", "xdeepfm", "dlrm", "finalmlp", "wukong"
)  # fmt: skip

_LR = 1e-3
# Up to this many steps the dense layers' rate is constant. With more it falls with their square
# root, but not below 1e-4, or in a short training 5e-4. The tables' rate does not fall unless the
# batch is large, which gains 0.02 of AUC on 2 million synthetic rows (docs/experiments.md).
_STEPS_AT_FULL_RATE, _LEAST_LR, _LEAST_OF_SHORT = 600, 1e-4, 5e-4

# Epochs of a short training, and its steps with Adam's own betas; fewer steps have lower ones.
_SHORT, _STEPS_OF_BETAS = 3, 3200


class Choice(NamedTuple):
    """A key that the recipe chose, such as `train.batch_size`, with its value and the reason."""

    key: str
    value: Any
    reason: str


def takes_strength(config: Config, rows: int) -> bool:
    """Whether the recipe's L2 follows the `strength` of `with_recipe`."""
    return config.model.name == "lr" and config.optim.embedding.l2 is None and rows < SMALL_LOG


def with_recipe(
    config: Config,
    rows: int,
    fields: int,
    world_size: int,
    saved: Mapping[str, Any] | None = None,
    strength: float | None = None,
) -> tuple[Config, list[Choice]]:
    """Fill in every key of a configuration that was left to the recipe.

    Args:
        rows: of the training part.
        fields: number of id fields.
        world_size: number of ranks; the batch is a multiple of it.
        saved: configuration of the checkpoint that the run continues; its values are kept.
        strength: the C of scikit-learn's logistic regression that suits the log, for the network
            `lr`; None: unknown.

    Returns:
        The configuration, and the recipe's own choices, without those of `saved` or the user.

    Raises:
        SettingsError: the resulting settings contradict each other.
    """
    values = config.model_dump(mode="json")
    choices = []
    # Runs from before there was a recipe used the paper's values for missing keys.
    before = below_old_runs(dict(saved)) if saved else {}
    run = _Run(values, rows, fields, world_size, strength)
    for key, choose in _CHOICES.items():
        # Also for keys that are given or saved: `kind` must be found before these are set.
        choice = _times_factor(Choice(key, *choose(run)), run)
        if not _is_open(values, key):
            continue
        value = at(before, key)
        if value is None:
            value = choice.value
            # Without a scaling rule, the base batch size only sets the recipe's own rates.
            if key != "optim.scaling.base_batch_size" or config.optim.scaling.rule != "none":
                choices.append(choice)
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
    return {key for key in _CHOICES if _is_open(values, key)}


class _Kind(Enum):
    """How a run trains; most choices depend on it."""

    USUAL = "some epochs with rates that fall"
    LARGE_BATCHES = "more epochs of few steps"
    UNTIL_NO_BETTER = "constant rates until the validation part no longer gains"
    SMALL_LR = "logistic regression on a small log, until the rates are 0"
    NEW_PERIOD = "a period that begins anew on all files so far"
    NEXT_PERIOD = "a period that goes on with the model before"


@dataclass
class _Run:
    """What the choices depend on.

    Attributes:
        values: each key of `_CHOICES` has its final value before the next one is chosen.
        rows, fields, world_size, strength: see `with_recipe`.
    """

    values: Mapping[str, Any]
    rows: int
    fields: int
    world_size: int
    strength: float | None

    def at(self, key: str) -> Any:
        """The value of a key; None if it is open or absent."""
        return at(self.values, key)

    @property
    def network(self) -> str:
        """Name of the network."""
        return self.at("model.name")

    @property
    def is_small(self) -> bool:
        """Whether the log is small."""
        return self.rows < SMALL_LOG

    @cached_property
    def hundredths(self) -> float:
        """The batch, divided by a hundredth of the rows rounded down to a power of two.

        Large logs have enough steps, and a period is trained on once, however few its steps are.
        """
        if self.rows >= LARGE_LOG or self.at("data.split") == "periods":
            return 1.0
        hundredth = _power_of_two(self.rows / _STEPS_PER_EPOCH, _SMALLEST_BATCH)
        return max(1.0, self.at("train.batch_size") / hundredth)

    @property
    def longer(self) -> float:
        """How many times longer large batches train and warm up if their epochs have few steps."""
        return round(max(1.0, math.sqrt(self.hundredths / _FEW_STEPS)), 2)

    @property
    def usual_epochs(self) -> int:
        """Epochs of a run whose rates fall."""
        epochs = next(epochs for most, epochs in _EPOCHS if self.rows < most)
        return epochs * (2 if self.network in _WITHOUT_HIDDEN_LAYERS else 1)

    @cached_property
    def kind(self) -> _Kind:
        """How the run trains; found before `train.epochs` and what follows is chosen."""
        if self.at("data.split") == "periods":
            replay = self.at("train.replay")
            is_anew = bool(replay) or (replay is None and self.is_small)
            return _Kind.NEW_PERIOD if is_anew else _Kind.NEXT_PERIOD
        if self.hundredths >= _LARGE:
            return _Kind.LARGE_BATCHES
        if not self.is_small:
            return _Kind.USUAL
        if self.network == "lr":
            return _Kind.SMALL_LR
        # Whoever names few epochs, rates that fall, or weights that are not averaged knows where
        # the rates have to end.
        epochs = self.at("train.epochs")
        decays = (self.at(f"optim.{part}.schedule.decay") for part in ("embedding", "dense"))
        is_open = epochs is None or epochs > self.usual_epochs
        is_open &= all(decay in (None, "constant") for decay in decays)
        is_open &= self.at("train.averaging") != 0
        return _Kind.UNTIL_NO_BETTER if is_open else _Kind.USUAL

    @property
    def is_short(self) -> bool:
        """Whether the training is short and its rates fall; `train.epochs` is chosen before."""
        return self.kind is _Kind.USUAL and self.at("train.epochs") <= _SHORT


def _base_batch_size(run: _Run) -> tuple[int, str]:
    base = _power_of_two(run.rows / _STEPS_PER_EPOCH, _SMALLEST_BATCH, _LARGEST_BASE)
    return base, f"{run.rows / base:,.0f} steps an epoch of {run.rows:,} rows"


def _batch_size(run: _Run) -> tuple[int, str]:
    least = min(run.at("optim.scaling.base_batch_size"), _LARGEST_BATCH)
    size = _power_of_two(run.rows / _STEPS_OF_LARGE_BATCHES, least, _LARGEST_BATCH)
    size = max(1, round(size / run.world_size)) * run.world_size
    return size, f"{run.rows / size:,.0f} steps an epoch"


def _epochs(run: _Run) -> tuple[int, str]:
    if run.kind is _Kind.NEW_PERIOD:
        epochs = _EPOCHS_ANEW if run.is_small else run.usual_epochs
        return epochs, "a new model of all files so far"
    if run.kind is _Kind.NEXT_PERIOD:
        return 1, "each period is trained on once"
    if run.kind is _Kind.LARGE_BATCHES:
        steps = math.ceil(run.rows / run.at("train.batch_size"))
        return round(run.usual_epochs * _MORE_EPOCHS * run.longer), f"{steps:,} steps an epoch"
    if run.kind is _Kind.UNTIL_NO_BETTER:
        return _MOST_EPOCHS, "at most, until evaluations are no longer better"
    if run.kind is _Kind.SMALL_LR:
        return _EPOCHS_OF_LR, "until the rates are 0"
    return run.usual_epochs, f"{run.rows:,} rows"


def _averaging(run: _Run) -> tuple[int, str]:
    if run.kind in (_Kind.UNTIL_NO_BETTER, _Kind.NEW_PERIOD):
        return _SNAPSHOTS, "rates do not fall"
    return 0, "rates fall"


def _every_epochs(run: _Run) -> tuple[int, str]:
    epochs = run.at("train.epochs")
    if run.strength is not None and run.kind is _Kind.SMALL_LR:
        return epochs, "C is chosen by validation, and only the last epoch has its minimum"
    if run.kind is _Kind.NEW_PERIOD and run.is_small:
        return epochs, "no epoch is chosen"
    return 1, "each epoch may be the best"


def _patience(run: _Run) -> tuple[int, str]:
    evaluated = run.at("train.epochs") / run.at("evaluate.every_epochs")
    patience = max(_PATIENCE, math.ceil(_OF_THE_EPOCHS * evaluated))
    if run.kind is _Kind.UNTIL_NO_BETTER:
        patience = _SHORT_PATIENCE
    return patience, "evaluated epochs without a better evaluate.metric end the training"


def _falling_lr(run: _Run) -> tuple[float, str]:
    """A rate that falls with the number of steps; of large batches, those in the usual epochs."""
    is_large, base = run.kind is _Kind.LARGE_BATCHES, run.at("optim.scaling.base_batch_size")
    steps = (run.usual_epochs if is_large else run.at("train.epochs")) * run.rows / base
    falling = _LR * math.sqrt(_STEPS_AT_FULL_RATE / max(steps, _STEPS_AT_FULL_RATE))
    return max(falling, _LEAST_LR), f"for {steps:,.0f} steps of batch size {base:,}"


def _table_lr(run: _Run) -> tuple[float, str]:
    falling, reason = _falling_lr(run)
    if run.kind is _Kind.LARGE_BATCHES:
        return falling * _TABLES_FASTER, reason
    if run.kind is _Kind.NEXT_PERIOD:
        # Rates are constant within a period, and fall from one to the next.
        return falling, reason
    lr = _LR
    if run.kind is _Kind.UNTIL_NO_BETTER or (run.kind is _Kind.NEW_PERIOD and run.is_small):
        lr = _LR * _FASTER
    elif run.kind is _Kind.SMALL_LR:
        lr = _LR_OF_LR
    return lr, f"at batch size {run.at('optim.scaling.base_batch_size'):,}"


def _dense_lr(run: _Run) -> tuple[float, str]:
    falling, reason = _falling_lr(run)
    slower = _DENSE_SLOWER if run.kind is _Kind.LARGE_BATCHES else 1
    least = _LEAST_OF_SHORT if run.is_short else _LEAST_LR
    return max(falling * slower, least), reason


def _betas(run: _Run) -> tuple[list[float], str]:
    # Averages over fewer steps, as the gradients of larger batches are less noisy. After arXiv
    # 2205.10287: 1 - beta grows with the batch. Batches of fewer than _FEW_STEPS hundredths are
    # better with the betas of that many.
    if run.kind is _Kind.LARGE_BATCHES:
        grown = float(f"{4 * max(run.hundredths, _FEW_STEPS):.2g}")
    elif run.is_short and not run.is_small:
        steps = run.at("train.epochs") * run.rows / run.at("train.batch_size")
        grown = float(f"{max(1.0, _STEPS_OF_BETAS / steps):.1g}")
    else:
        grown = 1.0
    if grown == 1:
        return [0.9, 0.999], "Adam's"
    first, second = 1 - round(0.1 * grown ** (1 / 3), 1), 1 - 0.001 * grown
    return [max(0.0, round(first, 1)), max(0.5, round(second, 4))], "for few steps"


def _l2(run: _Run) -> tuple[float, str]:
    if run.strength is None:
        factor = _L2_OF_SHORT if run.is_short else _L2
        return factor * run.fields / run.rows, f"{factor:g} x {run.fields} fields / rows"
    # scikit-learn's penalty of the sum of losses, of weights that are stored divided.
    scale = run.at("model.first_order_scale") or _FIRST_ORDER_SCALE
    l2 = scale**2 / (2 * run.strength * run.rows)
    return l2, f"C={run.strength:g}, as L-BFGS chose"


def _warmup(run: _Run, section: str, usual: float, of_paper: float) -> tuple[float, str]:
    warmup = usual
    if run.at("preset") == "paper":
        # The preset leaves it open if it must be written in steps.
        warmup = of_paper
    elif run.kind is _Kind.LARGE_BATCHES:
        warmup = min(run.longer, run.at("train.epochs") / 4)
    if run.at(f"{section}.schedule.unit") == "steps":
        steps = round(warmup * run.rows / run.at("train.batch_size"))
        return steps, f"{warmup:g} epochs, in steps"
    return warmup, "epochs"


def _decay(run: _Run) -> tuple[str, str]:
    if run.kind is _Kind.UNTIL_NO_BETTER:
        return "constant", "until evaluations are no longer better"
    if run.kind in (_Kind.NEW_PERIOD, _Kind.NEXT_PERIOD):
        return "constant", "another period may follow"
    return "polynomial", "a straight line to 0 at the end of training"


def _first_order_scale(run: _Run) -> tuple[float, str]:
    if not network(run.network).first_order:
        return 1.0, f"{run.network} has no first-order term"
    reason = "4 times the rate and 1/16 of the L2 for first-order weights"
    return _FIRST_ORDER_SCALE, reason


def _dropout(run: _Run) -> tuple[float, str]:
    if run.network not in _WITH_HIDDEN_LAYERS:
        return 0.0, f"dropout was not tried with {run.network}"
    if run.rows < _DROPOUT_BELOW:
        return _DROPOUT, f"fewer than {_DROPOUT_BELOW:,} rows"
    return 0.0, f"{_DROPOUT_BELOW:,} rows and more"


# The function that chooses each key, in this order: later choices depend on earlier ones.
_CHOICES: dict[str, Callable[[_Run], tuple[Any, str]]] = {
    "optim.scaling.base_batch_size": _base_batch_size,
    "train.batch_size": _batch_size,
    "train.epochs": _epochs,
    "train.averaging": _averaging,
    "evaluate.every_epochs": _every_epochs,
    "evaluate.patience": _patience,
    "evaluate.metric": lambda _: (
        "both", "AUC minus logloss: an overfitted model may still rank well",
    ),
    "optim.scaling.rule": lambda _: ("sqrt_star", "rates by the root of the batch, the same L2"),
    "optim.embedding.lr": _table_lr,
    "optim.embedding.betas": _betas,
    "optim.embedding.l2": _l2,
    "optim.embedding.schedule.warmup": lambda run: _warmup(run, "optim.embedding", 0.0, 0.0),
    "optim.embedding.schedule.decay": _decay,
    "optim.dense.lr": _dense_lr,
    "optim.dense.betas": _betas,
    "optim.dense.schedule.warmup": lambda run: _warmup(run, "optim.dense", _WARMUP, 1.0),
    "optim.dense.schedule.decay": _decay,
    "model.first_order_scale": _first_order_scale,
    "model.dropout": _dropout,
}  # fmt: skip


# The key with a factor of a choice.
_FACTORS = {
    "optim.embedding.lr": "recipe.table_lr",
    "optim.dense.lr": "recipe.dense_lr",
    "optim.embedding.l2": "recipe.l2",
    "train.epochs": "recipe.epochs",
}


def _times_factor(choice: Choice, run: _Run) -> Choice:
    """The choice times the factor that the configuration has for it."""
    key = _FACTORS.get(choice.key)
    if key is None or (factor := run.at(key)) == 1:
        return choice
    value = factor * choice.value
    if isinstance(choice.value, int):
        value = max(1, round(value))
    return Choice(choice.key, value, f"{choice.reason}, x {factor:g} ({key})")


def _power_of_two(size: float, least: int, most: float = math.inf) -> int:
    """The largest power of two up to `size`, within `least` and `most`."""
    return int(min(max(2 ** int(math.log2(max(size, 1))), least), most))


def _is_open(values: Mapping[str, Any], key: str) -> bool:
    section, _, name = key.rpartition(".")
    return (at(values, section) or {}).get(name, "absent") is None
