"""Permutation importance: what a model loses without a column of the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from stampede.data.errors import DataError
from stampede.data.learning.learned import read_saved
from stampede.data.prepared.manifest import LEARNED_FOLDER, Manifest, PartName
from stampede.data.prepared.reader import Shard, ShardedPart
from stampede.data.samples import Bag, Part, by_goal
from stampede.data.schema.schema import TimePart
from stampede.engine.config import goal_weights
from stampede.engine.console import progress_bar
from stampede.engine.inference.kept import inputs_folder, remedy
from stampede.engine.inference.prediction import open_own_part
from stampede.engine.inference.trained import Trained, scored
from stampede.engine.metrics import PartMetrics
from stampede.models import CTRModel
from stampede.settings import SettingsError


@dataclass
class _Inputs:
    """The inputs of a model that are made from a column: places of each kind."""

    ids: list[int] = field(default_factory=list)
    bags: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)


def permutation_importance(
    trained: Trained,
    model: CTRModel,
    *,
    part: PartName = "test",
    rows: int = 100_000,
    repeats: int = 5,
    goal: str | None = None,
    seed: int = 0,
    batch_size: int = 8192,
) -> pd.DataFrame:
    """What the model loses if the values of a column are shuffled among the rows of a part.

    All inputs made from a column move together: a number and its bin, an hour and its weekday. In
    repeat r, column c of `columns` gets the order `default_rng([seed, r, c]).permutation(n)`.

    Args:
        model: with its tables.
        rows: at most; of a larger part, rows that `seed` draws.
        goal: of several; None: the one with the largest weight in what selects an epoch.

    Returns:
        By column, the most important first: the means over the repeats of the AUC lost and the
        logloss added, `auc_lost` and `logloss_added`, and their standard errors, `auc_error` and
        `logloss_error`. In `attrs`: `part`, `rows` used, `of_rows`, `auc`, `logloss`, `goal`,
        `repeats`, `seed` and `columns`, in the order that they were shuffled in.

    Raises:
        DataError, RunFolderError: the part is not there, or has clicks only or none.
        SettingsError: there is no such goal, or a number is too small.
    """
    for name, value, least in (("rows", rows, 2), ("repeats", repeats, 2)):
        if value < least:
            raise SettingsError(f"{name}: found {value}; write a number of at least {least}")
    at = _place_of_goal(trained, goal)
    whole, _, manifest = open_own_part(trained, part)
    held = _held(whole, rows, seed)

    def measured(arrays: Mapping[str, Tensor]) -> np.ndarray:
        shuffled = ShardedPart((Shard(held.rows, arrays),))
        metrics = PartMetrics((), samples=held.rows)
        for batch in scored(model, shuffled, batch_size):
            logits, label = (by_goal(one)[at] for one in batch[:2])
            known = ~np.isnan(label)
            metrics.add(logits[known], label[known], batch.weight[known])
        found = metrics.result()
        if found["auc"] is None:
            goals = trained.data.goals
            of_goal = f" of {goals[at]}" if goals else ""
            what = "clicks only or none" if metrics.samples else "no labels"
            raise DataError(f"the {part} part has {what}{of_goal}: no AUC; write another --part")
        return np.array([found["auc"], found["logloss"]])

    arrays = held.shards[0].arrays
    columns = _inputs_by_column(trained, manifest, single=arrays["ids"].shape[1])
    baseline = measured(arrays)
    changes = np.zeros((len(columns), repeats, 2))
    with progress_bar(len(columns) * repeats, 0, True, "importance", "shuffles") as bar:
        for place, inputs in enumerate(columns.values()):
            for repeat in range(repeats):
                order = np.random.default_rng([seed, repeat, place]).permutation(held.rows)
                changes[place, repeat] = measured(_shuffled(held, inputs, order)) - baseline
                bar.update()
    changes[:, :, 0] *= -1
    means, errors = changes.mean(1), changes.std(1, ddof=1) / np.sqrt(repeats)
    table = pd.DataFrame(
        np.stack([means[:, 0], errors[:, 0], means[:, 1], errors[:, 1]], 1),
        columns=["auc_lost", "auc_error", "logloss_added", "logloss_error"],
        index=pd.Index(list(columns), name="column"),
    ).sort_values("auc_lost", ascending=False, kind="stable")
    table.attrs = {
        "part": part,
        "rows": held.rows,
        "of_rows": whole.rows,
        "auc": float(baseline[0]),
        "logloss": float(baseline[1]),
        "goal": trained.data.goals[at] if trained.data.goals else None,
        "repeats": repeats,
        "seed": seed,
        "columns": list(columns),
    }
    return table


def _place_of_goal(trained: Trained, goal: str | None) -> int:
    goals = trained.data.goals
    if goal is None:
        weights = goal_weights(trained.config, goals)
        return goals.index(max(goals, key=weights.__getitem__)) if goals else 0
    if goal not in goals:
        known = (
            f"write one of {', '.join(goals)}" if goals else "the run has one label; leave it out"
        )
        raise SettingsError(f"goal: found {goal!r}; {known}")
    return goals.index(goal)


def _held(part: Part, most: int, seed: int) -> ShardedPart:
    """At most so many rows of a part, in memory."""
    rows = torch.arange(part.rows)
    if part.rows > most:
        drawn = np.random.default_rng(seed).choice(part.rows, most, replace=False)
        rows = torch.from_numpy(np.sort(drawn))
    samples = part.read(rows.to(part.device))
    arrays = {"ids": samples.ids, "numbers": samples.dense, "label": samples.label}
    if samples.weight is not None:
        arrays["weight"] = samples.weight
    for number, bag in enumerate(samples.bags):
        arrays |= _of_bag(number, bag)
    return ShardedPart((Shard(len(rows), {name: one.cpu() for name, one in arrays.items()}),))


def _of_bag(number: int, bag: Bag) -> dict[str, Tensor]:
    ends = torch.zeros(len(bag.lengths) + 1, dtype=torch.int64)
    torch.cumsum(bag.lengths.cpu(), 0, out=ends[1:])
    found = {f"offsets_{number}": ends, f"values_{number}": bag.values}
    return found if bag.weights is None else found | {f"weights_{number}": bag.weights}


def _shuffled(held: ShardedPart, inputs: _Inputs, order: np.ndarray) -> Mapping[str, Tensor]:
    """The arrays with a column's inputs in another order of rows."""
    arrays, moved = dict(held.shards[0].arrays), held.read(torch.from_numpy(order))
    for name, places, source in (
        ("ids", inputs.ids, moved.ids),
        ("numbers", inputs.numbers, moved.dense),
    ):
        if places:
            arrays[name] = arrays[name].clone()
            arrays[name][:, places] = source[:, places].to(arrays[name].dtype)
    for number in inputs.bags:
        arrays |= _of_bag(number, moved.bags[number])
    return arrays


def _inputs_by_column(
    trained: Trained, manifest: Manifest | None, single: int
) -> dict[str, _Inputs]:
    """The inputs made from each column of the log; without a schema, each input is a column.

    Args:
        single: number of the single-valued fields, which come first.
    """
    fields, columns = list(trained.data.vocabulary_sizes), {}
    numbers = [f"number_{at + 1}" for at in range(trained.data.numbers)]
    if manifest is not None:
        numbers = manifest.numbers
        kept = inputs_folder(trained.config, trained.run)
        if kept is not None and (kept / LEARNED_FOLDER).is_dir():
            schema = read_saved(kept / LEARNED_FOLDER, remedy(kept)).schema_
            columns = schema.sources()
            timed = [name for name, one in schema.ids.items() if isinstance(one, TimePart)]
            columns |= {name: schema.time.column for name in timed if schema.time}
    found: dict[str, _Inputs] = {}
    for kind, names in (("ids", fields[:single]), ("bags", fields[single:]), ("numbers", numbers)):
        for at, name in enumerate(names):
            getattr(found.setdefault(columns.get(name, name), _Inputs()), kind).append(at)
    return found
