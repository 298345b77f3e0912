"""The recipe: chooses settings that are not given, from the training part.

Every rule is a function of the number of training rows and of given settings.
`benchmarks/quality.py` compares the results with logistic regression.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
# root, but not below 1e-4. The tables' rate does not fall unless the batch is large, which gains
# 0.02 of AUC on 2 million synthetic rows (docs/experiments.md).
_STEPS_AT_FULL_RATE, _LEAST_LR = 600, 1e-4


_KEYS = (
    "optim.scaling.base_batch_size", "train.batch_size", "train.epochs", "train.averaging",
    "evaluate.every_epochs", "evaluate.patience", "evaluate.metric",
    "optim.scaling.rule", "optim.embedding.lr", "optim.embedding.betas", "optim.embedding.l2",
    "optim.embedding.schedule.warmup", "optim.embedding.schedule.decay", "optim.dense.lr",
    "optim.dense.betas", "optim.dense.schedule.warmup", "optim.dense.schedule.decay",
    "model.first_order_scale", "model.dropout",
)  # fmt: skip


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
    for choice in _chosen(values, rows, fields, world_size, strength):
        key = choice.key
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
    return {key for key in _KEYS if _is_open(values, key)}


def _chosen(
    values: Mapping[str, Any], rows: int, fields: int, world_size: int, strength: float | None
) -> Iterator[Choice]:
    """A choice for each of `_KEYS`, in order.

    `values` must have each key's final value before the next choice is asked for: later rules
    depend on it.
    """
    periodic, name = at(values, "data.split") == "periods", at(values, "model.name")

    base = _power_of_two(rows / _STEPS_PER_EPOCH, _SMALLEST_BATCH, _LARGEST_BASE)
    reason = f"{rows / base:,.0f} steps an epoch of {rows:,} rows"
    yield Choice("optim.scaling.base_batch_size", base, reason)
    base = at(values, "optim.scaling.base_batch_size")
    size = _power_of_two(rows / _STEPS_OF_LARGE_BATCHES, min(base, _LARGEST_BATCH), _LARGEST_BATCH)
    size = max(1, round(size / world_size)) * world_size
    yield Choice("train.batch_size", size, f"{rows / size:,.0f} steps an epoch")

    # The batch, divided by a hundredth of the rows rounded down to a power of two. Large logs have
    # enough steps, and a period is trained on once, however few its steps are.
    batch, hundredths = at(values, "train.batch_size"), 1.0
    if rows < LARGE_LOG and not periodic:
        hundredth = _power_of_two(rows / _STEPS_PER_EPOCH, _SMALLEST_BATCH)
        hundredths = max(1.0, batch / hundredth)
    is_large = hundredths >= _LARGE
    # How many times longer large batches train and warm up if their epochs have few steps.
    longer = round(max(1.0, math.sqrt(hundredths / _FEW_STEPS)), 2)
    usual_epochs = next(epochs for most, epochs in _EPOCHS if rows < most)
    usual_epochs *= 2 if name in _WITHOUT_HIDDEN_LAYERS else 1
    # Whoever names few epochs knows where the rates have to end.
    given = at(values, "train.epochs")
    is_small = rows < SMALL_LOG and not (periodic or is_large)
    replay = at(values, "train.replay")
    is_anew = periodic and (bool(replay) or (replay is None and rows < SMALL_LOG))
    until_no_better = is_small and name != "lr"
    until_no_better &= given is None or given > usual_epochs
    # Nor do rates that fall, or weights that are not averaged.
    keys = ("optim.embedding.schedule.decay", "optim.dense.schedule.decay")
    until_no_better &= all(at(values, key) in (None, "constant") for key in keys)
    until_no_better &= at(values, "train.averaging") != 0
    epochs, reason = usual_epochs, f"{rows:,} rows"
    if is_anew:
        epochs = _EPOCHS_ANEW if rows < SMALL_LOG else usual_epochs
        reason = "a new model of all files so far"
    elif periodic:
        epochs, reason = 1, "each period is trained on once"
    elif is_large:
        epochs = round(usual_epochs * _MORE_EPOCHS * longer)
        reason = f"{math.ceil(rows / batch):,} steps an epoch"
    elif until_no_better:
        epochs, reason = _MOST_EPOCHS, "at most, until evaluations are no longer better"
    elif is_small and name == "lr":
        epochs, reason = _EPOCHS_OF_LR, "until the rates are 0"
    yield Choice("train.epochs", epochs, reason)
    epochs = at(values, "train.epochs")
    snapshots, reason = 0, "rates fall"
    if until_no_better or is_anew:
        snapshots, reason = _SNAPSHOTS, "rates do not fall"
    yield Choice("train.averaging", snapshots, reason)
    every, reason = 1, "each epoch may be the best"
    if strength is not None and is_small:
        every, reason = epochs, "C is chosen by validation, and only the last epoch has its minimum"
    elif is_anew and rows < SMALL_LOG:
        every, reason = epochs, "no epoch is chosen"
    yield Choice("evaluate.every_epochs", every, reason)
    patience = math.ceil(_OF_THE_EPOCHS * (epochs / at(values, "evaluate.every_epochs")))
    if until_no_better:
        patience = _SHORT_PATIENCE
    reason = "evaluated epochs without a better evaluate.metric end the training"
    yield Choice("evaluate.patience", max(_PATIENCE, patience), reason)
    reason = "AUC minus logloss: an overfitted model may still rank well"
    yield Choice("evaluate.metric", "both", reason)

    reason = "rates by the root of the batch, the same L2"
    yield Choice("optim.scaling.rule", "sqrt_star", reason)
    # For a large batch, the steps in the usual epochs.
    steps = (usual_epochs if is_large else epochs) * rows / base
    falling_lr = max(
        _LR * math.sqrt(_STEPS_AT_FULL_RATE / max(steps, _STEPS_AT_FULL_RATE)), _LEAST_LR
    )
    for_steps = f"for {steps:,.0f} steps of batch size {base:,}"
    of_tables = (_LR, f"at batch size {base:,}")
    # Rates are constant within a period, and fall from one to the next.
    if is_large or (periodic and not is_anew):
        of_tables = (falling_lr * (_TABLES_FASTER if is_large else 1), for_steps)
    of_layers = (max(falling_lr * (_DENSE_SLOWER if is_large else 1), _LEAST_LR), for_steps)
    betas = ([0.9, 0.999], "Adam's")
    if is_large:
        # Averages over fewer steps, as the gradients of larger batches are less noisy. After arXiv
        # 2205.10287: 1 - beta grows with the batch. Batches of fewer than _FEW_STEPS hundredths are
        # better with the betas of that many.
        at_least = max(hundredths, _FEW_STEPS)
        first = 1 - round(0.1 * (4 * at_least) ** (1 / 3), 1)
        second = 1 - float(f"{0.004 * at_least:.2g}")
        betas = ([max(0.0, round(first, 1)), max(0.5, round(second, 4))], "for few steps")
    decay = ("polynomial", "a straight line to 0 at the end of training")
    if until_no_better:
        decay = ("constant", "until evaluations are no longer better")
        of_tables = (_LR * _FASTER, of_tables[1])
    elif is_small and name == "lr":
        of_tables = (_LR_OF_LR, of_tables[1])
    elif is_anew and rows < SMALL_LOG:
        of_tables = (_LR * _FASTER, of_tables[1])
    if periodic:
        decay = ("constant", "another period may follow")
    for section, lr, usual, of_paper in (
        ("optim.embedding", of_tables, 0.0, 0.0),
        ("optim.dense", of_layers, _WARMUP, 1.0),
    ):
        yield Choice(f"{section}.lr", *lr)
        yield Choice(f"{section}.betas", *betas)
        if section == "optim.embedding":
            l2, reason = _L2 * fields / rows, f"{_L2:g} x {fields} fields / rows"
            if strength is not None:
                # scikit-learn's penalty of the sum of losses, of weights that are stored divided.
                scale = at(values, "model.first_order_scale") or _FIRST_ORDER_SCALE
                l2, reason = scale**2 / (2 * strength * rows), f"C={strength:g}, as L-BFGS chose"
            yield Choice(f"{section}.l2", l2, reason)
        warmup, reason = usual, "epochs"
        if at(values, "preset") == "paper":
            # The preset leaves it open if it must be written in steps.
            warmup = of_paper
        elif is_large:
            warmup = min(longer, epochs / 4)
        if at(values, f"{section}.schedule.unit") == "steps":
            warmup, reason = round(warmup * rows / batch), f"{warmup:g} epochs, in steps"
        yield Choice(f"{section}.schedule.warmup", warmup, reason)
        yield Choice(f"{section}.schedule.decay", *decay)

    scale, reason = 1.0, f"{name} has no first-order term"
    if network(name).first_order:
        scale = _FIRST_ORDER_SCALE
        reason = "4 times the rate and 1/16 of the L2 for first-order weights"
    yield Choice("model.first_order_scale", scale, reason)
    dropout, reason = 0.0, f"{_DROPOUT_BELOW:,} rows and more"
    if name not in _WITH_HIDDEN_LAYERS:
        reason = f"dropout was not tried with {name}"
    elif rows < _DROPOUT_BELOW:
        dropout, reason = _DROPOUT, f"fewer than {_DROPOUT_BELOW:,} rows"
    yield Choice("model.dropout", dropout, reason)


def _power_of_two(size: float, least: int, most: float = math.inf) -> int:
    """The largest power of two up to `size`, within `least` and `most`."""
    return int(min(max(2 ** int(math.log2(max(size, 1))), least), most))


def _is_open(values: Mapping[str, Any], key: str) -> bool:
    section, _, name = key.rpartition(".")
    return (at(values, section) or {}).get(name, "absent") is None
