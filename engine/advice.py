"""Advice that a run prints when something looks wrong: what was found, and what to do.

Data and settings that could only train a useless model are refused.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from tqdm import tqdm

from stampede.data import DataError, Dataset, Part, only_labels
from stampede.data.prepared.manifest import TEST, TRAIN
from stampede.data.samples import ClickShare, by_goal, click_shares, sampled_rows
from stampede.data.unseen_ids import unseen_sentences
from stampede.engine.config import Config
from stampede.engine.processes import Processes
from stampede.engine.results.run_folder import RunFolder
from stampede.engine.training.plateau import METRIC_NAMES, selection_score
from stampede.settings import DAMAGE, SettingsError, counted

# Whole paths and keys, so that they can be copied.
_WRAPPER = textwrap.TextWrapper(
    98, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
)

_FEWEST_STEPS = 50
_LEAST_AUC = 0.55
# Rates that fall to 0 make the last epoch the best, by less than this.
_STILL_RISING = 0.001
# What is said of parts with other shares of clicks than the training part.
_OFF = "scores will be off by as much"

# How many times more or less clicks a part has than the training part; by what share of the clicks
# predictions miss them; and by how many standard errors.
_MOVED, _MISSED, _ERRORS = 1.25, 0.2, 4.0

_OTHER_LABELS = (
    "check the label column, or choose another split (data.split, or split of stampede prepare)"
)


def tell(sentences: Sequence[str], step: int, folder: RunFolder, processes: Processes) -> None:
    """Print and log sentences that are new for this run; all ranks must call it."""

    def tell_new() -> None:
        for text in sentences:
            if text not in told(folder):
                tqdm.write(_WRAPPER.fill(f"advice: {text}"))
                folder.log({"kind": "advice", "step": step, "text": text})

    if sentences:
        processes.on_main(tell_new)


def told(folder: RunFolder) -> list[str]:
    """The sentences that the run has said so far."""
    # The log may have been damaged before the run was continued.
    with suppress(*DAMAGE):
        return [line["text"] for line in folder.lines() if line["kind"] == "advice"]
    return []


def check_batch_size(batch_size: int, rows: int, world_size: int = 1) -> None:
    """Refuse a batch larger than the data: rates would be scaled to a batch that never occurs."""
    if batch_size > rows:
        raise SettingsError(
            f"train.batch_size: found {batch_size:,}, but the training part has "
            f"{counted(rows, 'row')}; write train.batch_size="
            f"{_batch_of_enough_steps(rows, world_size)}, or leave it to the recipe with "
            "train.batch_size=null"
        )


def check_labels(dataset: Dataset) -> None:
    """Refuse a training part of one class."""
    for found in _one_class("training", dataset.train, dataset.goals):
        raise DataError(f"{found}, so there is nothing to learn: {_OTHER_LABELS}")


def _one_class(name: str, part: Part, goals: Sequence[str]) -> Iterator[str]:
    """A clause for each goal whose labels in a part are all the same."""
    for goal, label in zip(goals or ("",), only_labels(part), strict=True):
        if label is None:
            continue
        of = f"the goal {goal!r} in the {name} part" if goal else f"the {name} part"
        what = f"no label of {of}" if math.isnan(label) else f"every label of {of} is {label:g}"
        yield f"{what} ({counted(part.rows, 'row')})"


def on_batch_size(batch_size: int, rows: int, world_size: int = 1) -> list[str]:
    """Advice if an epoch of so many training rows has too few steps."""
    steps = -(-rows // batch_size)
    if steps >= _FEWEST_STEPS:
        return []
    smaller = _batch_of_enough_steps(rows, world_size)
    remedy = f"use a smaller train.batch_size, such as {smaller:,}"
    if smaller >= batch_size:
        remedy = "train on more rows, or for more epochs"
    return [f"an epoch has only {counted(steps, 'step')} of batch {batch_size:,}: {remedy}"]


def _batch_of_enough_steps(rows: int, world_size: int) -> int:
    # Batch sizes are a multiple of the number of processes.
    size = world_size
    while 2 * size * _FEWEST_STEPS <= rows:
        size *= 2
    return size


def on_data(dataset: Dataset, can_calibrate: bool = True) -> list[str]:
    """Advice from preparation, on parts of one class, on columns with ids unseen in training, and
    on those that leak the label.

    Reads the labels and some 65,000 rows of each part, which must be on the CPU.

    Args:
        can_calibrate: whether the run may have `evaluate.calibrate`.
    """
    sentences = [dataset.advice] if dataset.advice else []
    for name, part in (("validation", dataset.validation), ("test", dataset.test)):
        if part is not None:
            found = _one_class(name, part, dataset.goals)
            sentences += [f"{clause}: {_OTHER_LABELS}" for clause in found]
    if dataset.shuffle:
        # Rows that are drawn independently neither move nor leak, and take seconds to draw.
        sentences += _moved_shares(dataset, can_calibrate)
        # The rows of a period are its training and its test part.
        sentences += [] if dataset.period else _leaks(dataset)
    if dataset.validation is None or not dataset.unseen_rows:
        return sentences
    # Rare ids, which have the same row, are as frequent in both.
    rare, found = (_unseen_shares(part, dataset) for part in (dataset.train, dataset.validation))
    unseen = {field: share - rare[field] for field, share in found.items()}
    return [*sentences, *unseen_sentences(unseen, "validation")]


def _moved_shares(dataset: Dataset, can_calibrate: bool) -> Iterator[str]:
    """A sentence for each goal that is far more or less frequent in another part."""
    shares = {name: click_shares(part) for name, part in dataset.parts().items()}

    def has_moved(found: ClickShare, before: ClickShare) -> bool:
        # Parts of one class have been told.
        if not found.share or found.share == 1 or not before.share:
            return False
        if 1 / _MOVED <= found.share / before.share <= _MOVED:
            return False
        variance = before.share * (1 - before.share) * (1 / before.labels + 1 / found.labels)
        return abs(found.share - before.share) > _ERRORS * math.sqrt(variance)

    remedy = " and set evaluate.calibrate=true" if can_calibrate else ""
    for number, goal in enumerate(dataset.goals or ("",)):
        found = {name: of_goals[number] for name, of_goals in shares.items()}
        before = found.pop("train")
        moved = [f"{s.share:.3g} of the {n} rows" for n, s in found.items() if has_moved(s, before)]
        if moved:
            what = f"of {goal!r}, among those with this label" if goal else "of 1"
            yield (
                f"{before.share:.3g} of the training rows but {' and '.join(moved)} have labels "
                f"{what}: {_OFF}. If the rows are in time order, train on newer ones{remedy}; if "
                "negatives were left out, see train.negative_rate; else check the split"
            )


def _leaks(dataset: Dataset) -> list[str]:
    """What to say of id fields that leak the label, by a sample of the rows.

    Numbers are seen by their bins, which are id fields. Clicks are those of the first goal.
    """
    # Polars, which --help does without.
    import polars as pl

    from stampede.data.leaks import alone, counts_by_value, leak_sentences

    def columns(part: Part, number: int) -> Iterator[pl.DataFrame]:
        """For each field, a row's id, or of several whether it has any; and its label."""
        samples = part.read(torch.from_numpy(sampled_rows(part.rows)))
        label = pl.Series(by_goal(samples.label)[0].numpy()).fill_nan(None)
        has_any = (bag.lengths > 0 for bag in samples.bags)
        for values in chain(samples.ids.T, has_any):
            yield pl.DataFrame({"value": values.numpy(), "label": label}).with_columns(part=number)

    name, other = (
        ("validation", dataset.validation) if dataset.validation else ("test", dataset.test)
    )
    of_parts = columns(dataset.train, TRAIN), columns(other, TEST)
    found = []
    for field, *frames in zip(dataset.vocabulary_sizes, *of_parts, strict=True):
        counts = counts_by_value(pl.concat(frames).lazy(), "value", "part", "label")
        found.append((field, alone(counts)))
    return leak_sentences(found, name, dataset.goals[0] if dataset.goals else "")


def _unseen_shares(part: Part, dataset: Dataset) -> dict[str, float]:
    """Share of the sampled rows with an unseen or rare id, by field."""
    samples = part.read(torch.from_numpy(sampled_rows(part.rows)))
    fields, shares = list(dataset.vocabulary_sizes), {}
    for field, row in dataset.unseen_rows.items():
        # Multi-valued fields come last.
        number, bag = fields.index(field), fields.index(field) - samples.ids.shape[1]
        if bag < 0:
            found = int((samples.ids[:, number] == row).sum())
        else:
            of = torch.arange(len(samples.label)).repeat_interleave(samples.bags[bag].lengths)
            found = len(of[samples.bags[bag].values == row].unique())
        shares[field] = found / len(samples.label)
    return shares


def on_first_epoch(part: str, score: float | None, epoch: int) -> list[str]:
    """Advice if nothing was learned by the first evaluated epoch, by the AUC of a part."""
    if score is None or score >= _LEAST_AUC:
        return []
    return [
        f"the {part} AUC is {score:.4f} after epoch {epoch}, hardly above chance: check labels and "
        "columns, or try higher rates"
    ]


def on_calibration(
    config: Config,
    results: Mapping[str, Mapping[str, Any]],
    clicks: Callable[[], Sequence[ClickShare]],
    told: Sequence[str] = (),
) -> list[str]:
    """Advice if the mean prediction on the test part is far from the share of clicks.

    Args:
        clicks: reads those of the test part, by goal.
        told: what the run has said; that its parts have other shares of clicks says it all.
    """
    if any(_OFF in text for text in told):
        return []
    found = results["test"]
    goals = found.get("goals") or {"": found}
    far = {
        goal: one["calibration"]
        for goal, one in goals.items()
        # A model that learned nothing gets other advice.
        if (one.get("auc") or 0.0) >= _LEAST_AUC
        and abs((one.get("calibration") or 1.0) - 1) > _MISSED
    }
    if far:
        shares = dict(zip(goals, clicks(), strict=True))
        far = {goal: value for goal, value in far.items() if not _is_chance(value, shares[goal])}
    if not far:
        return []
    told = ", ".join(f"{value:.2f}" + f" for {goal}" * bool(goal) for goal, value in far.items())
    remedy = (
        "if the log lacks negatives in the training part only, write the share that it kept as "
        "train.negative_rate; else clicks have become rarer or more frequent since: train on newer "
        "rows"
    )
    if config.evaluate.calibrate is not True and can_calibrate(config):
        remedy += ", or set evaluate.calibrate=true"
    if config.train.negative_rate < 1:
        remedy = (
            "metrics are those of uncorrected scores, so the test part must lack the same share of "
            "negatives as the training part (train.negative_rate)"
        )
    return [f"the mean prediction on the test part is {told} times the share of clicks: {remedy}"]


def _is_chance(calibration: float, clicks: ClickShare) -> bool:
    """Whether so many clicks may be drawn where as many as predicted are expected."""
    expected = (clicks.share or 0.0) * calibration
    if not 0 < expected < 1:
        return True
    error = math.sqrt((1 - expected) / (expected * clicks.labels))
    return abs(1 / calibration - 1) <= _ERRORS * error


def can_calibrate(config: Config) -> bool:
    """Whether a run may have `evaluate.calibrate=true`."""
    return config.evaluate.select_on != "test" and config.model.name != "esmm"


def on_memory(cached: float, free: float) -> list[str]:
    """Advice if the rows that are shuffled have too little room beside the model.

    Args:
        cached: bytes of `data.memory_gb` that the data take.
        free: bytes of main memory that are free, or cache files.
    """
    if free >= cached:
        return []
    fits = max(math.floor(free / 1e8) / 10, 0.1)
    return [
        f"data.memory_gb: {cached / 1e9:.2g} GB of rows are to stay in memory, but "
        f"{free / 1e9:.2g} GB are left, so training may wait for the disk: in a new run write "
        f"data.memory_gb={fits:g} or less, or a smaller train.batch_size"
    ]


def on_last_epoch(config: Config, folder: RunFolder) -> list[str]:
    """Advice if the last evaluation still improved what chooses the best epoch."""
    part, metric, scores = config.evaluate.select_on, config.evaluate.metric, []
    # The log may have been damaged before the run was continued.
    with suppress(*DAMAGE):
        found = [line for line in folder.lines() if line["kind"] == "evaluation"]
        scores = [selection_score(line, metric) for line in found if line["part"] == part]
    *earlier, last = [score for score in scores if score is not None] or [0.0]
    before = max(earlier, default=math.inf)
    if last - before < _STILL_RISING:
        return []
    sign = -1 if metric == "logloss" else 1
    return [
        f"the last epoch improved the best {part} {METRIC_NAMES[metric]} from "
        f"{sign * before:.4f} to {sign * last:.4f}: more epochs may gain more "
        f"(train.epochs={2 * config.train.epochs})"
    ]
