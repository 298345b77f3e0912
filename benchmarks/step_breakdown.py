"""Where the time of a training step goes: data, lookup, dense layers, update, and the rest.

Timers around the calls of a step, in this process, as launch.py trains: the next batch; the lookup,
with sending ids and catching up rows; the dense layers' forward, backward and Adam; the backward of
the lookup, which updates the tables, with the last flush. The rest is the loss, copying gradients
tile by tile, learning rates, finiteness checks and Python. One batch size is also measured with
torch.compile instead of the C++ kernels of the network.

    python benchmarks/step_breakdown.py
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import launchers_allocator  # noqa: F401
import torch
from clicks import IDS, write_clicks
from floors import PRECISIONS
from machine import CORES
from matplotlib.figure import Figure
from report import begin, markdown, picture_path
from timing import Stopwatch, seconds_of
from torch import Tensor
from tqdm import tqdm
from training import Training, training

PARTS = ("data", "lookup", "dense", "update", "other")

# Steps of each batch size, whole epochs of ROWS.
STEPS = {1024: 512, 8192: 64, 65536: 16}

ROWS = 1 << 19

# Batch size that is also measured compiled.
COMPILED = 8192


def main() -> None:
    options, report = begin("step_breakdown", __doc__)
    rows, ids = (65_536, 200_000) if options.quick else (ROWS, IDS)
    steps = {1024: 16, 8192: 4} if options.quick else STEPS
    clicks = write_clicks(options.folder, rows, ids)
    found: dict[str, dict] = {}
    points = [(batch, precision, "") for precision in PRECISIONS for batch in steps]
    if not options.quick:
        points += [(COMPILED, precision, " compiled") for precision in PRECISIONS]
    for batch, precision, compiled in tqdm(points, desc="step breakdown", unit="run", ncols=100):
        overrides = [f"train.batch_size={batch}", f"train.precision={precision}"]
        overrides += ["train.compile=default"] if compiled else []
        found[f"{batch} {precision}{compiled}"] = measure(clicks, overrides, batch, steps[batch])
        report.add(rows=rows, ids=ids, steps=steps, microseconds_per_sample=found)
    print(tables(report.found))
    draw(found, picture_path(options.out))
    report.close()


def measure(clicks: Path, overrides: list[str], batch: int, steps: int) -> dict[str, float]:
    """Microseconds a sample of each part, and of the whole step."""
    watch = Stopwatch()
    with training(clicks, overrides) as job, ExitStack() as stack:
        for _ in range(3):
            job.step()
        job.flush()
        watch_parts(watch, stack, job)
        total = seconds_of(lambda: job.seconds(steps))
    seconds = {part: watch.seconds.get(part, 0.0) for part in PARTS}
    seconds["other"] = total - sum(seconds.values())
    return {
        part: 1e6 * taken / (steps * batch) for part, taken in [*seconds.items(), ("step", total)]
    }


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
        (job.job.dense_optimizer, "step", "dense"),
        (job, "flush", "update"),
        (torch.Tensor, "backward", kind),
    ):
        stack.enter_context(watch.watching(owner, attribute, name))


def tables(found: dict) -> str:
    """The results as Markdown."""
    parts = found["microseconds_per_sample"]
    names = list(next(iter(parts.values())))
    rows = [
        [
            f"{int(name.split()[0]):,}",
            name.split(maxsplit=1)[1],
            *(f"{one[part]:.2f}" for part in names),
        ]
        for name, one in parts.items()
    ]
    picture = "![A training step](../benchmarks/results/step_breakdown.png)"
    shown = markdown(["batch", "", *names], rows)
    return f"{picture}\n\nA step, microseconds a sample:\n\n{shown}"


def draw(found: dict[str, dict[str, float]], path: Path) -> None:
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


if __name__ == "__main__":
    main()
