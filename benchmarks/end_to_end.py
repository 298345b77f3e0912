"""Training samples/s of launch.py beside plain PyTorch, data loading included, and the floors.

DeepFM, 26 tables of 10 columns, 2.6 million ids, MLP 400-400-400. launch.py trains with CowClip,
`rows: all` or `touched`; the time is its own (`train_seconds`), which includes the steps that rows
had missed. The peers (peers/plain_pytorch.py) do not clip, and SparseAdam leaves untouched rows
alone. Each run is a process of its own; contenders take turns, and floors are measured in the same
turns. Medians. "keeps memory" has glibc keep freed memory instead of returning it to the system.

    python benchmarks/end_to_end.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import floors
from clicks import FIELDS, IDS, write_clicks
from launched import KEEP_MEMORY, launch, run_program
from machine import CORES
from matplotlib.figure import Figure
from report import ROOT, Report, parse_options, picture_path
from tqdm import tqdm
from training import DEEPFM

PEER = ROOT / "benchmarks/peers/plain_pytorch.py"

# Training rows. An epoch is 512 steps at batch 1024; at larger batches two epochs are trained.
ROWS = 1 << 19

BATCHES = (1024, 8192, 65536)

# Smallest ratio to SparseAdam at its default allocator (issue 5).
BARS = {
    "1024 fp32 touched": 1.3,
    "1024 fp32 all": 1.0,
    "8192 fp32 all": 1.7,
    "8192 bf16 all": 4.0,
    "65536 fp32 all": 2.2,
    "65536 bf16 all": 5.0,
}

# Dense Adam passes through the whole table in every step, each time alike.
DENSE_STEPS = {1024: 100, 8192: 40, 65536: 8}


@dataclass(frozen=True)
class Contender:
    """What is trained, and how often.

    Attributes:
        batch: global batch size.
        trainer: `fp32` or `bf16` of launch.py; or a peer's optimizer.
        rows: which rows take a step.
        keeps_memory: whether the allocator is told to.
        repeats: at most so many runs.
    """

    batch: int
    trainer: str
    rows: str = "all"
    keeps_memory: bool = False
    repeats: int = 99

    @property
    def name(self) -> str:
        """Key in the results."""
        words = [str(self.batch), self.trainer]
        if self.is_ours:
            words.append(self.rows)
        return " ".join([*words, *(["keeps memory"] if self.keeps_memory else [])])

    @property
    def is_ours(self) -> bool:
        """Whether launch.py trains it."""
        return self.trainer in floors.PRECISIONS


def contenders(batch: int) -> list[Contender]:
    """All of a batch size; those that no bar is about run once."""
    found = [Contender(batch, "sparse_adam"), Contender(batch, "fp32"), Contender(batch, "bf16")]
    if batch != 8192:
        found.append(Contender(batch, "fp32", rows="touched"))
        found.append(Contender(batch, "bf16", rows="touched", repeats=1))
    found.append(Contender(batch, "sparse_adam", keeps_memory=True, repeats=1))
    found.append(Contender(batch, "fp32", keeps_memory=True, repeats=1))
    found.append(Contender(batch, "dense_adam", repeats=1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, help="runs of each contender; default: 3")
    parser.add_argument("--batches", type=int, nargs="+", help="default: 1024 8192 65536")
    options = parse_options(parser, "end_to_end")
    rows, ids = (16_384, 200_000) if options.quick else (ROWS, IDS)
    repeats = options.repeats or (1 if options.quick else 3)
    batches = options.batches or ((1024,) if options.quick else BATCHES)
    wanted = [one for batch in batches for one in contenders(batch)]
    if options.quick:
        wanted = [one for one in wanted if not one.keeps_memory and one.rows == "all"]
    report = Report(options.out, options.quick)
    found = measure(options.folder, wanted, rows, ids, repeats, report)
    print(table(found["samples_per_second"], found["floors"]))
    draw(found["samples_per_second"], found["floors"], picture_path(options.out))
    report.close()
    if found["failed"]:
        sys.exit(f"error: {len(found['failed'])} runs failed")


def measure(
    folder: Path, wanted: list[Contender], rows: int, ids: int, repeats: int, report: Report
) -> dict[str, Any]:
    """Let all contenders take turns; the report grows after each turn.

    Args:
        folder: for clicks and runs.
        wanted: the contenders.
        rows: training rows.
        ids: of all fields.
        repeats: turns.

    Returns:
        What was added to the report.
    """
    clicks = write_clicks(folder, rows, ids)
    runs: dict[str, list[float]] = {one.name: [] for one in wanted}
    busy: dict[str, list[float]] = {one.name: [] for one in wanted}
    turns = [one for turn in range(repeats) for one in wanted if turn < one.repeats]
    measured_floors: list[dict] = []
    failed: list[str] = []
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for position, one in enumerate(tqdm(turns, desc="end to end", unit="run", ncols=100)):
            if position % len(wanted) == 0:
                measured_floors.append(floors.measure(quick=rows < ROWS))
            before = report.others.seconds()
            try:
                runs[one.name].append(train(one, clicks, Path(scratch)))
            except RuntimeError as failure:
                failed.append(f"{one.name}: {failure}")
                tqdm.write(failed[-1])
            busy[one.name].append(round(report.others.share(since=before), 3))
            found = {
                "rows": rows,
                "ids": ids,
                "fields": FIELDS,
                "floors": _median_of(measured_floors),
                "samples_per_second": {
                    name: statistics.median(each) for name, each in runs.items() if each
                },
                "each_run": runs,
                "other_processes": busy,
                "failed": failed,
            }
            report.add(**found)
    return found


def train(one: Contender, clicks: Path, scratch: Path) -> float:
    """Samples/s of one run.

    Raises:
        RuntimeError: it failed, or did not compute as asked.
    """
    environment = KEEP_MEMORY if one.keeps_memory else {}
    epochs = 1 if one.batch == BATCHES[0] else 2
    if one.is_ours:
        summary = launch(
            DEEPFM,
            [
                f"data.path={clicks}",
                f"train.batch_size={one.batch}",
                f"train.epochs={epochs}",
                f"train.precision={one.trainer}",
                f"optim.embedding.rows={one.rows}",
            ],
            scratch,
            environment=environment,
        )
        if summary["dense_layers"] != one.trainer:
            raise RuntimeError(
                f"train.precision={one.trainer} was asked for, but the dense layers computed in "
                f"{summary['dense_layers']}: the check at the start found it faster on this CPU"
            )
        return summary["samples_per_second"]
    command = [PEER, clicks, "--batch", one.batch, "--optimizer", one.trainer]
    command += ["--threads", CORES, "--epochs", epochs]
    if one.trainer == "dense_adam":
        command += ["--steps", DENSE_STEPS[one.batch]]
    result = json.loads(run_program(command, environment=environment).splitlines()[-1])
    return result["samples"] / result["seconds"]


def _median_of(measured: list[Any]) -> Any:
    """The median of each figure of several measurements."""
    if isinstance(measured[0], dict):
        return {key: _median_of([one[key] for one in measured]) for key in measured[0]}
    return statistics.median(measured)


def table(speeds: dict[str, float], measured_floors: dict) -> str:
    """For people: what is reached, beside the bars and beside what the MLP alone takes."""
    lines = [
        f"{'batch':>6}  {'trainer':<30}{'samples/s':>10}{'/ SparseAdam':>14}{'bar':>5}"
        f"{'/ MLP alone':>13}{'MLP alone / SparseAdam':>24}"
    ]
    for name, speed in speeds.items():
        batch, trainer, *rest = name.split()
        peer = speeds.get(f"{batch} sparse_adam")
        precision = trainer if trainer in floors.PRECISIONS else "fp32"
        floor = floors.mlp_samples_per_second(measured_floors, precision, int(batch))
        bar = BARS.get(name)
        shown = trainer if trainer not in floors.PRECISIONS else f"stampede {trainer}"
        lines.append(
            f"{int(batch):>6}  {' '.join([shown, *rest]):<30}{speed:>10,.0f}"
            f"{'' if peer is None else f'{speed / peer:.2f}':>14}"
            f"{'' if bar is None else f'{bar:.1f}':>5}{speed / floor:>13.2f}"
            f"{'' if peer is None else f'{floor / peer:.2f}':>24}"
        )
    return "\n".join([*lines, "", floors.table(measured_floors)])


def draw(speeds: dict[str, float], measured_floors: dict, path: Path) -> None:
    """Samples/s by batch size, with the MLP alone as a line above each bar."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    batches = sorted({int(name.split()[0]) for name in speeds})
    shown = {
        "dense_adam": ("plain PyTorch, dense Adam", "0.8"),
        "sparse_adam": ("plain PyTorch, SparseAdam", "0.6"),
        "fp32 all": ("stampede, fp32", "tab:blue"),
        "bf16 all": ("stampede, bf16", "tab:orange"),
    }
    width = 0.8 / len(shown)
    for number, (key, (label, color)) in enumerate(shown.items()):
        places = [place + number * width for place in range(len(batches))]
        heights = [speeds.get(f"{batch} {key}", 0.0) / 1e3 for batch in batches]
        axes.bar(places, heights, width, label=label, color=color)
        if key.endswith("all"):
            tops = [
                floors.mlp_samples_per_second(measured_floors, key.split()[0], batch) / 1e3
                for batch in batches
            ]
            left, right = ([p + side * width / 2 for p in places] for side in (-1, 1))
            axes.hlines(tops, left, right, color="black", linewidth=1.5)
    axes.plot([], [], color="black", label="the MLP alone")
    axes.set_xticks([p + 1.5 * width for p in range(len(batches))], [f"{b:,}" for b in batches])
    axes.set(xlabel="batch", ylabel="thousand samples/s", title=f"DeepFM, {CORES} cores")
    axes.legend(loc="upper left")
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
