"""DIN and MMoE beside FuxiCTR's own on the same rows: time of a training step, and its parts.

Each sample has a user, an item and a history of 50 items, or of 12 on average, drawn at random; as
many users and items as Amazon Electronics, the log of DIN's paper, or as Taobao's UserBehavior.
Layers are the defaults of FuxiCTR's classes. DIN attends to
the history, with Dice in its unit; MMoE, with two goals, averages it.
FuxiCTR's `train_step` has padded batches ready in memory; ours reads them, counts ids, clips by
CowClip and brings all rows up to date at the end of a turn. Both are in one process, with as many
threads, and take turns of some steps; the ratio is that of medians. Other programs hardly change
the processor time of one thread, which is what is compared.

    PYTHONPATH=.:FUXICTR PYTHON benchmarks/histories.py

PYTHON has stampede's requirements and `fuxictr`; FUXICTR is a checkout of
https://github.com/reczoo/FuxiCTR, for its MMoE.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, islice, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from machine import describe_machine
from report import Report, command_line, markdown
from timing import interleaved
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from training import DEEPFM, Training

from stampede.data import Dataset, GlobalBatches
from stampede.data.samples import Bag, Samples
from stampede.engine.config.load import load_config
from stampede.engine.job.build import build
from stampede.engine.processes import processes
from stampede.engine.start_up import before_torch

# Users and items.
LOGS = {"Amazon": (192_403, 63_001), "Taobao": (987_994, 4_162_024)}
DIM, MOST, HIDDEN, UNIT = 16, 50, [512, 128, 64], [64]
EXPERTS, TOWER, GATE = 4, [128, 64], [128, 64]
BATCHES, MEANS = (1024, 8192), {50: None, 12: 12.0}
# Network, log, and ids of a history.
CASES = [("din", "Amazon", 50), ("din", "Amazon", 12), ("din", "Taobao", 50),
         ("mmoe", "Amazon", 50), ("mmoe", "Taobao", 50)]  # fmt: skip
GOALS = {"din": (), "mmoe": ("click", "buy")}


class Rows:
    """Drawn rows of a log as a `Part`, with histories of 50 ids or of geometric lengths."""

    device = torch.device("cpu")

    def __init__(self, log: str, rows: int, mean: float | None, goals: int) -> None:
        draw = np.random.default_rng(0)
        users, items = LOGS[log]
        self.sizes = {"user": users, "item": items, "history": items}
        self.rows, self.goals = rows, goals
        self.users = torch.from_numpy(draw.integers(1, users, rows))
        # Some items are far more frequent than others.
        ids = (items - 1) * draw.random(rows * (MOST + 1)) ** 3 + 1
        self.items = torch.from_numpy(ids.astype(np.int64)).view(rows, MOST + 1)
        lengths = np.full(rows, MOST)
        if mean is not None:
            lengths = np.minimum(draw.geometric(1 / (mean + 1), rows) - 1, MOST)
        self.lengths = torch.from_numpy(lengths)
        self.labels = torch.from_numpy(draw.random((rows, max(goals, 1))) < 0.2).float()

    def read(self, rows: Tensor) -> Samples:
        """See `Part`."""
        lengths, items = self.lengths[rows], self.items[rows]
        is_id = torch.arange(MOST) < lengths.unsqueeze(1)
        ids = torch.stack([self.users[rows], items[:, MOST]], 1).int()
        bag = Bag(items[:, :MOST][is_id].int(), lengths.int())
        return Samples(ids, torch.zeros(len(rows), 0), self.label(rows), (bag,))

    def label(self, rows: Tensor) -> Tensor:
        """See `Part`."""
        return self.labels[rows] if self.goals else self.labels[rows, 0]

    def weight(self, rows: Tensor) -> None:
        """See `Part`."""
        return None

    def padded(self, first: int, last: int) -> dict[str, Tensor]:
        """A batch as FuxiCTR reads it, with zeros before the ids of a history."""
        items, back = self.items[first:last], torch.arange(MOST, 0, -1)
        is_id = back <= self.lengths[first:last].unsqueeze(1)
        batch = {"user": self.users[first:last], "item": items[:, MOST]}
        batch["history"] = items[:, :MOST].where(is_id, 0)
        return batch | {f"goal_{i}": one for i, one in enumerate(self.labels[first:last].T)}


@contextmanager
def ours(name: str, rows: Rows, batch: int, precision: str) -> Iterator[Training]:
    """Our training of a network."""
    options = {"din": "{activation: relu}",
               "mmoe": f"{{experts: {EXPERTS}, tower: {TOWER}, gate: {GATE}}}"}  # fmt: skip
    config = load_config(DEEPFM, [
        "data.kind=prepared", "data.path=none", "evaluate.select_on=test",
        "preset=paper", f"train.batch_size={batch}", f"model.name={name}", f"model.dim={DIM}",
        f"train.precision={precision}", f"model.hidden={HIDDEN}", f"model.options={options[name]}",
        "model.attention.activation=dice", f"model.attention.hidden={UNIT}",
    ])  # fmt: skip
    reads = {"din": {"attention": {"history": "item"}}, "mmoe": {"mean": ("history",)}}[name]
    dataset = Dataset(
        rows.sizes, 0, rows, None, rows, multi=("history",), shared={"history": "item"},
        goals=GOALS[name], **reads,
    )  # fmt: skip
    with processes("cpu") as here:
        job = build(config, dataset, here)
        batches = GlobalBatches(rows, list(rows.sizes), batch, 0, 1, ahead=1)
        yield Training(config, dataset, job, here, batches)


def theirs(name: str, rows: Rows, batch: int) -> Callable[[], Any]:
    """A step of FuxiCTR's own network."""
    # Only its checkout has them.
    from model_zoo.DIN.src.DIN import DIN
    from model_zoo.multitask.MMoE.src.MMoE import MMoE

    history = {
        "type": "sequence", "source": "", "vocab_size": rows.sizes["item"], "max_len": MOST,
        "padding_idx": 0,
        "feature_encoder": None if name == "din" else "layers.MaskedAveragePooling()",
        "share_embedding": "item",
    }  # fmt: skip
    features = OrderedDict(
        {
            name: {"type": "categorical", "source": "", "vocab_size": rows.sizes[name]}
            for name in ("user", "item")
        },
        history=history,
    )
    labels = [f"goal_{i}" for i in range(max(len(GOALS[name]), 1))]
    shape = SimpleNamespace(
        features=features, labels=labels, num_fields=3, dataset_id="", data_dir="", group_id=None,
        sum_emb_out_dim=lambda: 3 * DIM,
    )  # fmt: skip
    alike = {"embedding_dim": DIM, "loss": "binary_crossentropy", "optimizer": "adam",
             "verbose": 0, "model_root": "", "metrics": []}  # fmt: skip
    if name == "din":
        model = DIN(
            shape, dnn_hidden_units=HIDDEN, attention_hidden_units=UNIT, din_target_field=["item"],
            din_sequence_field=["history"], task="binary_classification", **alike,
        )  # fmt: skip
    else:
        model = MMoE(
            shape, task=["binary_classification"] * 2, num_tasks=2, num_experts=EXPERTS,
            expert_hidden_units=HIDDEN, gate_hidden_units=GATE, tower_hidden_units=TOWER, **alike,
        )  # fmt: skip
    model.train()
    model._max_gradient_norm = 10.0
    batches = [rows.padded(first, first + batch) for first in range(0, rows.rows, batch)]
    turning = cycle(batches)
    return lambda: model.train_step(next(turning))


def histories(options: argparse.Namespace, report: Report) -> str:
    """Seconds of a step by network, batch and length of the histories."""
    torch.set_num_threads(1)
    repeats, found = 1 if options.quick else options.repeats, {}
    for precision, (name, log, ids), batch in product(options.precision, CASES, BATCHES):
        steps = 1 if options.quick else {1024: 8, 8192: 4}[batch]
        rows = Rows(log, batch * 4, MEANS[ids], len(GOALS[name]))
        measured = beside(name, rows, batch, steps, repeats, precision)
        found[f"{name}, {log}, {ids}, {batch}, {precision}"] = measured
        report.add(steps=found)
    return tables(found)


def beside(
    name: str, rows: Rows, batch: int, steps: int, repeats: int, precision: str
) -> dict[str, Any]:
    """Medians of seconds of a step, and the operators that take most of ours."""
    step = theirs(name, rows, batch)
    with ours(name, rows, batch, precision) as training:

        def processor_seconds(step: Callable[[], Any], end: Callable[[], Any]) -> float:
            start = time.process_time()
            for _ in range(steps):
                step()
            end()
            return (time.process_time() - start) / steps

        seconds = interleaved({
            "ours": lambda: processor_seconds(training.step, training.flush),
            "theirs": lambda: processor_seconds(step, lambda: None),
        }, repeats)  # fmt: skip
        found: dict[str, Any] = {who: statistics.median(each) for who, each in seconds.items()}
        found["ratio"] = found["theirs"] / found["ours"]
        found["ratios"] = [b / a for a, b in zip(*seconds.values(), strict=True)]
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            training.seconds(steps)
    operators = sorted(seen.key_averages(), key=lambda one: -one.self_cpu_time_total)
    total = sum(one.self_cpu_time_total for one in operators)
    shares = {one.key: one.self_cpu_time_total / total for one in islice(operators, 12)}
    return {**found, "share_of_operators": {key: round(one, 3) for key, one in shares.items()}}


def tables(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        [
            *name.split(", "),
            f"{one['ours'] * 1e3:.0f}",
            f"{one['theirs'] * 1e3:.0f}",
            f"{one['ratio']:.1f}",
        ]
        for name, one in found.items()
    ]
    heads = [
        "network",
        "log",
        "ids of a history",
        "batch",
        "our products",
        "ours, ms a step",
        "FuxiCTR, ms a step",
        "times as fast",
    ]
    return markdown(heads, lines)


if __name__ == "__main__":
    # As commands do.
    before_torch()
    given = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given.add_argument("--repeats", type=int, default=5, help="turns of each")
    ours_only = "of our products; FuxiCTR's are float32; default: bf16 too if the CPU has it"
    fitting = ["fp32", "bf16"] if describe_machine()["bf16_instructions"] else ["fp32"]
    precisions = {"nargs": "+", "choices": ["fp32", "bf16"], "default": fitting}
    given.add_argument("--precision", **precisions, help=ours_only)
    command_line(histories, parser=given)
