"""Small jobs for tests, described as a user would."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from stampede.engine.checkpoint.manifest import DTYPES, read_manifest
from stampede.engine.checkpoint.retention import newest
from stampede.engine.checkpoint.tensors import read_tensors
from stampede.engine.config import Config, goal_weights
from stampede.engine.config.load import load_config
from stampede.engine.job.build import build
from stampede.engine.processes import Processes, processes
from stampede.engine.reading import Reader, open_dataset
from stampede.engine.run import run
from stampede.engine.step import prefetch, train_step
from stampede.engine.tables import FieldWeights
from stampede.engine.training.evaluate import evaluate
from stampede.optim import local_cowclip_tables
from support.gathering import gather_field

# What names of such figures end in.
TIMED = ("_per_second", "_seconds", "_bytes", "time")

SMALL = [
    "preset=paper",
    "train.epochs=1",
    "data.scale=0.0005",
    "data.rows=2000",
    "data.test_rows=300",
    "model.hidden=[16,16]",
    # Small enough that some rows are clipped from the start.
    "model.init_std=1e-4",
    "train.batch_size=256",
    "train.log_every=2",
    "evaluate.batch_size=128",
    "evaluate.compare_with_lr=false",
    "optim.embedding.lr=1e-2",
    "optim.dense.lr=1e-3",
    # On several ranks a search for a plan would take longer than all steps.
    "sharding.plan=table_wise",
]


def small_config(folder: Path, *overrides: str, world_size: int = 1, job=tuple(SMALL)):
    """A configuration that trains in a second."""
    path = folder / "small.yaml"
    path.write_text("")
    return load_config(path, [f"run.dir={folder}", *job, *overrides], world_size)


def run_small(folder: Path, overrides: list[str], world_size: int = 1) -> None:
    """A whole run, as the launcher does it; also as a rank of several."""
    run(small_config(folder, *overrides, world_size=world_size))


class Trained(NamedTuple):
    """What an epoch of training left; the tables on rank 0 only.

    `without_state`: tables of rank 0 whose optimizer has none.
    """

    losses: list[float]
    evaluation: dict[str, Any]
    tables: dict[str, FieldWeights | None]
    dense: dict[str, torch.Tensor]
    plan: set[str]
    without_state: set[str]


def train_an_epoch(config: Config) -> Trained:
    """Train step by step, then evaluate the test part; also as a rank of several."""
    with processes("cpu") as here:
        return train_an_epoch_in(here, config)


def train_an_epoch_in(here: Processes, config: Config) -> Trained:
    """The same in processes that are joined already."""
    dataset = open_dataset(config, here)
    job = build(config, dataset, here)
    reader = Reader(config, dataset, here)
    losses = [
        train_step(job, sent, step, here).item()
        for step, sent in enumerate(prefetch(reader.training(), job.front, here.device), 1)
    ]
    batches, goals = reader.evaluation(reader.dataset.test), goal_weights(config, dataset.goals)
    evaluation = evaluate(job.model, batches, here, goals=goals)
    tables = {
        f: gather_field(job.model, f, job.front.columns_of(f).dim, here) for f in dataset.tables
    }
    dense = {name: p.detach().clone() for name, p in job.dense_parameters.items()}
    plan = {p.sharding_type for m in job.model.plan.plan.values() for p in m.values()}
    without_state = {
        shard.table.rpartition("t_")[2]
        for kind in local_cowclip_tables(job.model)
        for array in kind.arrays
        for shard in array.shards
        if not array.states
    }
    return Trained(losses, evaluation, tables, dense, plan, without_state)


def losses_and_weights(folder: Path, overrides: list[str], world_size: int = 1) -> Trained:
    """An epoch on synthetic data; also as a rank of several."""
    return train_an_epoch(small_config(folder, *overrides, world_size=world_size))


def assert_same_training(one: Trained, other: Trained) -> None:
    """Check that two trainings agree, but for rounding."""
    assert other.losses == pytest.approx(one.losses, rel=1e-5)
    assert other.evaluation["samples"] == one.evaluation["samples"]
    assert other.evaluation["auc"] == pytest.approx(one.evaluation["auc"], abs=1e-4)
    assert other.evaluation["logloss"] == pytest.approx(one.evaluation["logloss"], rel=1e-5)
    for field, weights in one.tables.items():
        for mine, theirs in zip(weights, other.tables[field], strict=True):
            torch.testing.assert_close(theirs, mine, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(other.dense, one.dense, rtol=1e-3, atol=1e-5)


def lines(run: Path):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def untimed(values):
    """Without what depends on the clock or the machine."""
    return {key: value for key, value in values.items() if not key.endswith(TIMED)}


def without_times(run: Path):
    """Lines without what no two runs have in common."""
    return [untimed(line) for line in lines(run)]


def assert_same_lines(run: Path, other: Path) -> None:
    """Check that two runs have logged the same, but for why they stopped; names the keys."""
    ours, theirs = (
        [line for line in without_times(folder) if line["kind"] != "stopped"]
        for folder in (run, other)
    )
    for number, (mine, its) in enumerate(zip(ours, theirs, strict=False)):
        keys = [
            key for key in {**mine, **its}
            if (key in mine, mine.get(key)) != (key in its, its.get(key))
        ]  # fmt: skip
        differing = "".join(f"\n  {key}: {mine.get(key)!r}, {its.get(key)!r}" for key in keys)
        assert not keys, f"line {number}, {its.get('kind')} {its.get('part', '')}:{differing}"
    assert len(ours) == len(theirs), f"{len(ours)} lines, {len(theirs)}"


def tensors_of(checkpoint, random=False):
    """All tensors of a checkpoint, by name.

    Args:
        random: also what each rank has drawn last.
    """
    found = {
        name: torch.empty(entry.size, dtype=DTYPES[entry.dtype])
        for name, entry in read_manifest(checkpoint).tensors.items()
        if random or not name.startswith("random.")
    }
    read_tensors(checkpoint, dict(found), alone=True)
    return found


def same_end(run, undisturbed):
    """Check that two runs have come to the same, bit for bit and line for line.

    What each rank has drawn last is compared if they are as many.
    """
    assert_same_lines(run, undisturbed)
    one, other = (untimed(json.loads((f / "summary.json").read_text())) for f in (run, undisturbed))
    assert {**one, "world_size": None} == {**other, "world_size": None}
    random = one["world_size"] == other["world_size"]
    ends = [newest(folder / "checkpoints") for folder in (run, undisturbed)]
    one, other = (tensors_of(end, random) for end in ends)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
    one, other = (untimed(asdict(read_manifest(end).progress)) for end in ends)
    assert one == other
