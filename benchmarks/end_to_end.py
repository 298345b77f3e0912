"""Training samples/s of launch.py and of plain PyTorch, with data loading, and the floors.

DeepFM, 26 tables of 10 columns, 2.6 million ids, MLP 400-400-400. launch.py trains with CowClip,
`rows: all` or `touched`; the time is its own `train_seconds`, including the steps that rows had
missed. The peers (peers/plain_pytorch.py) do not clip, and SparseAdam skips untouched rows. Each
run has its own process. Contenders and floors take turns; results are medians. The launcher makes
glibc keep freed memory in huge pages instead of returning it to the system; "keeps memory" gives a
peer this setting.

    python benchmarks/end_to_end.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import floors
from clicks import FIELDS, IDS, write_clicks
from launched import KEEP_MEMORY, launch, run_program
from machine import CORES, QUIET, describe_machine, wait_for_quiet
from matplotlib.figure import Figure
from report import ROOT, Report, begin, markdown, picture_path, wrapped
from tqdm import tqdm
from training import DEEPFM

PEER = ROOT / "benchmarks/peers/plain_pytorch.py"

# Training rows. An epoch is 512 steps at batch 1024, 64 at 8192; after the last one the launcher
# evaluates and saves, which does not count.
ROWS = 1 << 19
EPOCHS = {1024: 1, 8192: 4, 65536: 4}

BATCHES = (1024, 8192, 65536)

# Dense Adam steps the whole table every time, so few steps suffice.
DENSE_STEPS = {1024: 100, 8192: 40, 65536: 8}

# Smallest ratio to SparseAdam at its default allocator (issue 5).
BARS = {
    "1024 fp32 touched": 1.3,
    "1024 fp32 all": 1.0,
    "8192 fp32 all": 1.7,
    "8192 bf16 all": 4.0,
    "65536 fp32 all": 2.2,
    "65536 bf16 all": 5.0,
}


# As many runs of a contender as there are turns.
MANY = 99


@dataclass(frozen=True)
class Contender:
    """A trainer and its number of runs.

    Attributes:
        batch: global batch size.
        trainer: `fp32` or `bf16` of launch.py; or a peer's optimizer.
        rows: which rows take a step.
        keeps_memory: whether a peer's allocator keeps memory like the launcher's.
        repeats: most runs.
    """

    batch: int
    trainer: str
    rows: str = "all"
    keeps_memory: bool = False
    repeats: int = MANY

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
    """All contenders of a batch size; those without a bar run once."""
    found = [Contender(batch, "sparse_adam"), Contender(batch, "fp32"), Contender(batch, "bf16")]
    if batch != 8192:
        found.append(Contender(batch, "fp32", rows="touched"))
        found.append(Contender(batch, "bf16", rows="touched", repeats=1 if batch == 1024 else MANY))
    found.append(Contender(batch, "sparse_adam", keeps_memory=True, repeats=1))
    found.append(Contender(batch, "dense_adam", repeats=1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--again",
        type=int,
        default=10,
        help="repeat up to this many runs during which other processes took more than "
        f"{QUIET:.0%} of the cores",
    )
    parser.add_argument(
        "--wait", type=float, default=0.0, help="seconds to wait for a quiet machine before a run"
    )
    options, report = begin("end_to_end", parser)
    rows, ids = (16_384, 200_000) if options.quick else (ROWS, IDS)
    repeats, batches = (1, BATCHES[:1]) if options.quick else (3, BATCHES)
    wanted = [one for batch in batches for one in contenders(batch)]
    if options.quick:
        wanted = [one for one in wanted if not one.keeps_memory and one.rows == "all"]
    if not describe_machine()["bf16_instructions"]:
        print("this CPU has no instructions for bf16: it is left out")
        wanted = [one for one in wanted if one.trainer != "bf16"]
    turns = [one for turn in range(repeats) for one in wanted if turn < one.repeats]
    again = 0 if options.quick else options.again
    clicks = write_clicks(options.folder, rows, ids)
    report.add(rows=rows, ids=ids, fields=FIELDS)
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        found = measure(clicks, Path(scratch), turns, report, again, options.wait)
    print(tables(found))
    draw(found["samples_per_second"], found["floors"], picture_path(options.out))
    report.close()
    if found["failed"]:
        sys.exit(f"error: {len(found['failed'])} runs failed")


@dataclass(frozen=True)
class Run:
    """One measurement.

    Attributes:
        samples_per_second: of training.
        other_processes: their share of the cores during the run.
    """

    samples_per_second: float
    other_processes: float


def measure(
    clicks: Path, scratch: Path, turns: list[Contender], report: Report, again: int, wait: float
) -> dict[str, Any]:
    """Let contenders take turns; the report grows after each run.

    Args:
        clicks: prepared folder.
        scratch: for the runs.
        turns: who runs, in this order.
        again: most runs to repeat at the end because the machine was not quiet.
        wait: seconds to wait for a quiet machine before a run.

    Returns:
        What was added to the report.
    """
    runs: dict[str, list[Run]] = {one.name: [] for one in turns}
    measured_floors: list[dict] = []
    failed: list[str] = []
    found: dict[str, Any] = {}
    waiting = list(turns)
    with tqdm(total=len(turns), desc="end to end", unit="run", ncols=100) as bar:
        while waiting:
            one = waiting.pop(0)
            wait_for_quiet(wait)
            # Once per round.
            if one == turns[0] or not measured_floors:
                measured_floors.append(floors.measure(quick=report.quick))
            before = report.others.seconds()
            try:
                speed = train(one, clicks, scratch)
            except RuntimeError as failure:
                failed.append(f"{one.name}: {failure}")
                tqdm.write(failed[-1])
            else:
                run = Run(speed, round(report.others.share(since=before), 3))
                runs[one.name].append(run)
                if run.other_processes > QUIET and again:
                    again -= 1
                    waiting.append(one)
                    bar.total += 1
            bar.update()
            found = {
                "floors": _median_of(measured_floors),
                "samples_per_second": {n: quiet_median(each) for n, each in runs.items() if each},
                "runs": {name: [asdict(run) for run in each] for name, each in runs.items()},
                "failed": failed,
            }
            report.add(**found)
    return found


def quiet_median(runs: list[Run]) -> float:
    """Median samples/s of undisturbed runs; of all runs if there is none."""
    quiet = [run for run in runs if run.other_processes <= QUIET]
    return statistics.median(run.samples_per_second for run in quiet or runs)


def train(one: Contender, clicks: Path, scratch: Path) -> float:
    """Samples/s of one run.

    Raises:
        RuntimeError: it failed, or did not compute as requested.
    """
    epochs = EPOCHS[one.batch]
    if one.is_ours:
        summary = launch(
            DEEPFM,
            one.trainer,
            [
                f"data.path={clicks}",
                f"train.batch_size={one.batch}",
                f"train.epochs={epochs}",
                f"evaluate.every_epochs={epochs}",
                f"optim.embedding.rows={one.rows}",
            ],
            scratch,
        )
        return summary["samples_per_second"]
    command = [PEER, clicks, "--batch", one.batch, "--optimizer", one.trainer]
    command += ["--threads", CORES, "--epochs", epochs]
    if one.trainer == "dense_adam":
        command += ["--steps", DENSE_STEPS[one.batch]]
    environment = KEEP_MEMORY if one.keeps_memory else {}
    result = json.loads(run_program(command, environment=environment).splitlines()[-1])
    return result["samples"] / result["seconds"]


def _median_of(measured: list[Any]) -> Any:
    if isinstance(measured[0], dict):
        return {key: _median_of([one[key] for one in measured]) for key in measured[0]}
    return statistics.median(measured)


def tables(found: dict) -> str:
    """The results as Markdown."""
    measured, speeds = found["floors"], found["samples_per_second"]
    rows = []
    for name, speed in speeds.items():
        batch, trainer, *rest = name.split()
        ours = trainer in floors.PRECISIONS
        # The MLP alone in that precision, and SparseAdam with the default allocator.
        alone = floors.mlp_samples_per_second(measured, trainer if ours else "fp32", int(batch))
        peer = speeds.get(f"{batch} sparse_adam")
        rows.append(
            [
                f"{int(batch):,}",
                " ".join([f"stampede {trainer}" if ours else trainer, *rest]),
                f"{speed:,.0f}",
                cell(peer and speed / peer),
                cell(BARS.get(name), 1),
                cell(speed / alone),
                cell(peer and alone / peer),
            ]
        )
    heads = ["batch", "trainer", "samples/s", "/ SparseAdam", "bar", "/ MLP alone"]
    mlp, flops = measured["mlp_samples_per_second"], measured["gemm_flops"]
    floor = "; ".join(
        f"{precision}: {' and '.join(f'{speed:,.0f}' for speed in mlp[precision].values())} "
        f"samples/s, the bare products {flops[precision] / 1e9:,.0f} GFLOP/s"
        for precision in floors.PRECISIONS
    )
    said = (
        f"The MLP alone, forward and backward, in tiles of "
        f"{' and '.join(map(str, floors.ROWS))} rows, {floor}; copying "
        f"{measured['copy_bytes_per_second'] / 1e9:.0f} GB/s."
    )
    parts = [
        "![Training speed](../benchmarks/results/end_to_end.png)",
        wrapped(said),
        markdown([*heads, "MLP alone / SparseAdam"], rows),
    ]
    if beside := all_beside_touched(speeds):
        parts.append("\n".join(f"- {one}" for one in beside))
    if beside := "; ".join(beside_our_allocator(speeds)):
        parts.append(
            wrapped(
                "`sparse_adam keeps memory` is SparseAdam with our allocator's setting. Samples/s "
                f"of `rows: all` over its, without a bar: {beside}."
            )
        )
    return "\n\n".join(parts)


def all_beside_touched(speeds: dict[str, float]) -> list[str]:
    """The cost of `rows: all`, a sentence for each batch size with both measured."""
    found = []
    for name, touched in speeds.items():
        batch, precision, *rows = name.split()
        everything = speeds.get(f"{batch} {precision} all")
        if rows == ["touched"] and everything:
            found.append(
                f"batch {int(batch):,}, {precision}: `rows: all` takes {touched / everything:.2f} "
                "times as long as `touched`" + (", bar 1.15" if int(batch) == 65536 else "")
            )
    return found


def beside_our_allocator(speeds: dict[str, float]) -> list[str]:
    """Ratios to SparseAdam with our launcher's allocator setting; they have no bar."""
    found = []
    for name, peer in speeds.items():
        batch, trainer, *setting = name.split()
        if trainer == "sparse_adam" and setting:
            ours = {
                precision: speeds.get(f"{batch} {precision} all") for precision in floors.PRECISIONS
            }
            shown = ", ".join(f"{p} {speed / peer:.2f}" for p, speed in ours.items() if speed)
            if shown:
                found.append(f"batch {int(batch):,}: {shown}")
    return found


def cell(value: float | None, digits: int = 2) -> str:
    """A formatted number; empty for None."""
    return "" if value is None else f"{value:.{digits}f}"


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
    # Room for the legend above the bars.
    axes.set_ylim(0, 1.35 * axes.get_ylim()[1])
    axes.legend(loc="upper left", ncols=3)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
