"""Training steps as launch.py takes them, within this process: their parts and growth.

python benchmarks/steps.py step_breakdown
python benchmarks/steps.py growth
"""

from __future__ import annotations

import argparse
import multiprocessing
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from clicks import FIELDS, IDS, write_clicks
from floors import PRECISIONS
from machine import CORES, memory_of_this_process
from matplotlib.figure import Figure
from report import Report, command_line, markdown, wrapped
from timing import Stopwatch
from torch import Tensor
from tqdm import tqdm
from training import Training, training

from stampede.engine.start_up import keep_freed_memory
from stampede.optim import local_cowclip_tables


def in_a_process(function: Any, *arguments: Any) -> Any:
    """The result of a function in a new process, whose peak memory is its own."""
    # Not a fork: torch's threads would be lost.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        result = pool.apply(function, arguments)
        # Joined, so that its processor time counts as this benchmark's.
        pool.close()
        pool.join()
    return result


# Parts of a step; steps of each batch size, whole epochs; the batch size that is also compiled.
PARTS = ("data", "lookup", "dense", "update", "other")
STEPS, COMPILED = {1024: 512, 8192: 64, 65536: 16}, 8192


def step_breakdown(options: argparse.Namespace, report: Report) -> str:
    """Where the time of a step goes, by timers around its calls.

    The next batch; the lookup, with sending ids and catching up rows; the dense layers' forward,
    backward and Adam; the backward of the lookup, which updates the tables, with the last flush.
    The rest is the loss, copying gradients tile by tile, learning rates, finiteness checks and
    Python. One batch size is also measured with torch.compile instead of the C++ kernels.
    """
    keep_freed_memory()
    rows, ids = (65_536, 200_000) if options.quick else (1 << 19, IDS)
    steps = {1024: 16, 8192: 4} if options.quick else STEPS
    clicks = write_clicks(options.folder, rows, ids)
    points = [(batch, precision, "") for precision in PRECISIONS for batch in steps]
    if not options.quick:
        points += [(COMPILED, precision, " compiled") for precision in PRECISIONS]
    found: dict[str, dict] = {}
    for batch, precision, compiled in tqdm(points, desc="step breakdown", unit="run", ncols=100):
        overrides = [f"data.path={clicks}", f"train.precision={precision}"]
        overrides += ["train.compile=default"] if compiled else []
        found[f"{batch} {precision}{compiled}"] = parts_of_a_step(overrides, batch, steps[batch])
        report.add(rows=rows, ids=ids, steps=steps, microseconds_per_sample=found)
    draw_parts(found, options.out.with_suffix(".png"))
    return step_breakdown_tables(report.found)


def parts_of_a_step(overrides: list[str], batch: int, steps: int) -> dict[str, float]:
    """Microseconds a sample of each part, and of the whole step."""
    watch = Stopwatch()
    with training([*overrides, f"train.batch_size={batch}"]) as job, ExitStack() as stack:
        job.seconds(3)
        watch_parts(watch, stack, job)
        total = job.seconds(steps)
    seconds = {part: watch.seconds[part] for part in PARTS}
    seconds |= {"other": total - watch.seconds.total(), "step": total}
    return {part: 1e6 * taken / (steps * batch) for part, taken in seconds.items()}


def watch_parts(watch: Stopwatch, stack: ExitStack, job: Training) -> None:
    """Time the parts of a step until the stack is closed."""

    def kind(tensor: Tensor, *_: object, **__: object) -> str:
        # The loss is a scalar; the looked-up rows are not.
        return "update" if tensor.ndim else "dense"

    for owner, attribute, name in (
        (job, "read", "data"),
        (job.job.front, "send", "lookup"),
        (job.job.front, "lookup_sent", "lookup"),
        (job.job.ctr_model, "logits", "dense"),
        (job.job.dense_optimizer, "update_", "dense"),
        (job, "flush", "update"),
        (torch.Tensor, "backward", kind),
    ):
        stack.enter_context(watch.watching(owner, attribute, name))


def step_breakdown_tables(found: dict) -> str:
    """The manual's picture and table."""
    rows = []
    for name, parts in found["microseconds_per_sample"].items():
        batch, computed = name.split(maxsplit=1)
        rows.append([f"{int(batch):,}", computed, *(f"{taken:.2f}" for taken in parts.values())])
    picture = "![A training step](../benchmarks/results/step_breakdown.png)"
    shown = markdown(["batch", "", *PARTS, "step"], rows)
    return f"{picture}\n\nA step, microseconds a sample:\n\n{shown}"


def draw_parts(found: dict[str, dict[str, float]], path: Path) -> None:
    """Bars of the parts, one on top of the other."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    runs = [name.split(maxsplit=1) for name in found]
    names = [f"{int(batch):,}\n{computed}" for batch, computed in runs]
    bottom = [0.0] * len(found)
    for part in PARTS:
        heights = [parts[part] for parts in found.values()]
        axes.bar(names, heights, 0.6, bottom=bottom, label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set(ylabel="microseconds a sample", title=f"A training step of DeepFM, {CORES} cores")
    axes.legend(loc="upper right")
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=120)


# The varied sizes; others stay at BATCH, IDS and FIELDS. `trained` are steps before the measured
# ones.
BATCH = 8192
SERIES = {
    "batch": (1024, 4096, 16_384, 65_536, 131_072),
    "ids": (1_000_000, 3_000_000, 10_000_000, 30_000_000),
    "fields": (13, 26, 52),
    "trained": (0, 1000, 2000),
}
QUICK = {"batch": (4096,), "ids": (100_000, 1_000_000), "fields": (13,), "trained": (8,)}
# Their units, if not their names.
GROWN = {"batch": "samples", "trained": "steps trained before"}


def growth(options: argparse.Namespace, report: Report) -> str:
    """How a step grows with the batch, with ids and with fields, and memory per id.

    CowClip and `rows: all` in fp32, with the last flush; also after many steps, when moments of
    untouched rows have decayed. Each point has its own process.
    """
    series = QUICK if options.quick else SERIES
    rows, ids = (4096, 100_000) if options.quick else (1 << 18, IDS)
    found: dict[str, dict[str, dict]] = {name: {} for name in series}
    points = [(name, value) for name, values in series.items() for value in values]
    for name, value in tqdm(points, desc="growth", unit="point", ncols=100):
        point = {"batch": BATCH, "ids": ids, "fields": FIELDS, "trained": 0, name: value}
        clicks = write_clicks(options.folder, rows, point["ids"], point["fields"])
        # A whole epoch.
        steps = max(rows // point["batch"], 2)
        size = clicks, point["batch"], steps, point["trained"]
        found[name][str(value)] = in_a_process(time_and_memory, *size)
        report.add(batch=BATCH, ids=ids, fields=FIELDS, rows=rows, growth=found)
    report.add(bytes_per_id=bytes_per_id(found["ids"]))
    return growth_tables(report.found)


def time_and_memory(clicks: Path, batch: int, steps: int, trained: int = 0) -> dict:
    """Seconds a step, and memory, after `trained` steps."""
    keep_freed_memory()
    torch.set_num_threads(CORES)
    before, _ = memory_of_this_process()
    with training([f"data.path={clicks}", f"train.batch_size={batch}"]) as job:
        job.seconds(2 + trained)
        seconds = job.seconds(steps)
        arrays = [a for tables in local_cowclip_tables(job.job.model) for a in tables.arrays]
        held = sum(tensor.nbytes for array in arrays for tensor in array.all_tensors())
        ids = sum(len(array.weights) for array in arrays)
    _, peak = memory_of_this_process()
    return {
        "ids": ids,
        "steps": steps,
        "seconds_per_step": seconds / steps,
        "samples_per_second": batch * steps / seconds,
        "table_bytes": held,
        "peak_bytes": peak,
        "peak_bytes_of_training": peak - before,
    }


def bytes_per_id(by_ids: dict[str, dict]) -> float:
    """Growth of the peak memory per id, from the fewest ids to the most."""
    fewest, *_, most = sorted(by_ids.values(), key=lambda point: point["ids"])
    return (most["peak_bytes"] - fewest["peak_bytes"]) / (most["ids"] - fewest["ids"])


def growth_tables(found: dict) -> str:
    """The manual's table."""
    rows = [
        [
            f"{int(value):,} {GROWN.get(name, name)}",
            f"{1e3 * one['seconds_per_step']:.0f}",
            f"{one['samples_per_second']:,.0f}",
            f"{one['table_bytes'] / 1e9:.2f}",
            f"{one['peak_bytes'] / 1e9:.2f}",
        ]
        for name, points in found["growth"].items()
        for value, one in points.items()
    ]
    said = (
        f"Growth from batch {found['batch']:,}, {found['ids']:,} ids and {found['fields']} fields, "
        "each by itself:"
    )
    heads = ["", "ms a step", "samples/s", "tables GB", "peak memory GB"]
    each = f"Each further id adds {found['bytes_per_id']:.0f} bytes to the peak."
    return f"{wrapped(said)}\n\n{markdown(heads, rows)}\n\n{each}"


if __name__ == "__main__":
    command_line(step_breakdown, growth)
