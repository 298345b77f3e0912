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
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

import floors
from clicks import FIELDS, IDS, write_clicks
from launched import KEEP_MEMORY, launch, run_program
from machine import CORES, QUIET, describe_machine
from matplotlib.figure import Figure
from report import ROOT, Report, command_line, markdown, wrapped
from tqdm import tqdm
from training import DEEPFM

# Training rows. An epoch is 512 steps at batch 1024, 64 at 8192; after the last one the launcher
# evaluates and saves, which does not count.
ROWS = 1 << 19
EPOCHS = {1024: 1, 8192: 4, 65536: 4}

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

# What is trained at each batch size, and how often: by launch.py, a precision and which rows take a
# step; by a peer, its optimizer.
KINDS = {"sparse_adam": 3, "fp32 all": 3, "bf16 all": 3, "fp32 touched": 3, "bf16 touched": 3,
         "sparse_adam keeps memory": 1, "dense_adam": 1}  # fmt: skip
OMITTED = ("8192 fp32 touched", "8192 bf16 touched")


def end_to_end(options: argparse.Namespace, report: Report) -> str:
    """Samples/s of all contenders, and the floors."""
    rows, ids = (16_384, 200_000) if options.quick else (ROWS, IDS)
    wanted = {f"{batch} {kind}": many for batch in EPOCHS for kind, many in KINDS.items()}
    if options.quick:
        wanted = {f"1024 {kind}": 1 for kind in ("sparse_adam", "fp32 all", "bf16 all")}
    if not describe_machine()["bf16_instructions"]:
        print("this CPU has no instructions for bf16: it is left out")
        wanted = {name: many for name, many in wanted.items() if "bf16" not in name}
    turns = [name for turn in range(3) for name, many in wanted.items()
             if turn < many and name not in OMITTED]  # fmt: skip
    clicks = write_clicks(options.folder, rows, ids)
    report.add(rows=rows, ids=ids, fields=FIELDS)
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        again = 0 if options.quick else options.again
        measure(clicks, Path(scratch), turns, report, again, options.quick)
    found = report.found
    report.failed = found["failed"]
    draw(found["samples_per_second"], found["floors"], options.out.with_suffix(".png"))
    return tables(found)


def measure(
    clicks: Path, scratch: Path, turns: list[str], report: Report, again: int, quick: bool = False
) -> None:
    """Let contenders take turns; the report grows after each run.

    Args:
        clicks: prepared folder.
        scratch: for the runs.
        turns: names of who runs, in this order.
        again: most runs to repeat at the end because the machine was not quiet.
    """
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in turns}
    measured, failed, waiting = [], [], list(turns)
    with tqdm(total=len(turns), desc="end to end", unit="run", ncols=100) as bar:
        while waiting:
            name = waiting.pop(0)
            # Once per round.
            if name == turns[0] or not measured:
                measured.append(floors.measure(quick))
            before = report.others.seconds()
            try:
                speed = train(name, clicks, scratch)
            except RuntimeError as failure:
                failed.append(f"{name}: {failure}")
                tqdm.write(failed[-1])
            else:
                others = round(report.others.share(since=before), 3)
                runs[name].append({"samples_per_second": speed, "other_processes": others})
                if others > QUIET and again:
                    again -= 1
                    waiting.append(name)
                    bar.total += 1
            bar.update()
            speeds = {name: quiet_median(each) for name, each in runs.items() if each}
            medians = _median_of(measured)
            report.add(floors=medians, samples_per_second=speeds, runs=runs, failed=failed)


def quiet_median(runs: list[dict[str, float]]) -> float:
    """Median samples/s of undisturbed runs; of all runs if there is none."""
    quiet = [run for run in runs if run["other_processes"] <= QUIET]
    return statistics.median(run["samples_per_second"] for run in quiet or runs)


def _median_of(measured: list[Any]) -> Any:
    if isinstance(measured[0], dict):
        return {key: _median_of([one[key] for one in measured]) for key in measured[0]}
    return statistics.median(measured)


def train(name: str, clicks: Path, scratch: Path) -> float:
    """Samples/s of one run.

    Raises:
        RuntimeError: it failed, or did not compute as requested.
    """
    batch, trainer, *kind = name.split()
    epochs = EPOCHS[int(batch)]
    if trainer in floors.PRECISIONS:
        overrides = [f"data.path={clicks}", f"train.batch_size={batch}", f"train.epochs={epochs}"]
        overrides += [f"evaluate.every_epochs={epochs}", f"optim.embedding.rows={kind[0]}"]
        return launch(DEEPFM, trainer, overrides, scratch)["samples_per_second"]
    command = [ROOT / "benchmarks/peers/plain_pytorch.py", clicks, "--batch", batch]
    command += ["--optimizer", trainer, "--threads", CORES, "--epochs", epochs]
    if trainer == "dense_adam":
        command += ["--steps", DENSE_STEPS[int(batch)]]
    done = run_program(command, environment=KEEP_MEMORY if kind else None)
    result = json.loads(done.said.splitlines()[-1])
    return result["samples"] / result["seconds"]


def tables(found: dict) -> str:
    """The results as Markdown."""
    measured, speeds = found["floors"], found["samples_per_second"]
    rows, beside, kept = [], [], []
    for name, speed in speeds.items():
        batch, trainer, *kind = name.split()
        ours, shown = trainer in floors.PRECISIONS, f"{int(batch):,}"
        # The MLP alone in that precision, and SparseAdam with the default allocator.
        alone = floors.mlp_samples_per_second(measured, trainer if ours else "fp32", int(batch))
        peer = speeds.get(f"{batch} sparse_adam", math.nan)
        who = " ".join([f"stampede {trainer}" if ours else trainer, *kind])
        row = [shown, who, f"{speed:,.0f}", f"{speed / peer:.2f}", BARS.get(name, "")]
        rows.append([*row, f"{speed / alone:.2f}", f"{alone / peer:.2f}"])
        if kind == ["touched"]:
            ratio = speed / speeds.get(f"{batch} {trainer} all", math.nan)
            bar = ", bar 1.15" if batch == "65536" else ""
            said = f"`rows: all` takes {ratio:.2f} times as long as `touched`"
            beside.append(f"- batch {shown}, {trainer}: {said}{bar}")
        if kind == ["keeps", "memory"]:
            all_ = {one: speeds.get(f"{batch} {one} all") for one in floors.PRECISIONS}
            ratios = ", ".join(f"{one} {mine / speed:.2f}" for one, mine in all_.items() if mine)
            kept.append(f"batch {shown}: {ratios}")
    heads = ["batch", "trainer", "samples/s", "/ SparseAdam", "bar", "/ MLP alone"]
    mlp, flops = measured["mlp_samples_per_second"], measured["gemm_flops"]
    floor = "; ".join(
        f"{precision}: {' and '.join(f'{speed:,.0f}' for speed in mlp[precision].values())} "
        f"samples/s, the bare products {flops[precision] / 1e9:,.0f} GFLOP/s"
        for precision in floors.PRECISIONS
    )
    alone = (
        f"The MLP alone, forward and backward, in tiles of "
        f"{' and '.join(map(str, floors.ROWS))} rows, {floor}; copying "
        f"{measured['copy_bytes_per_second'] / 1e9:.0f} GB/s."
    )
    setting = (
        "`sparse_adam keeps memory` is SparseAdam with our allocator's setting. Samples/s of "
        f"`rows: all` over its, without a bar: {'; '.join(kept)}."
    )
    parts = [
        "![Training speed](../benchmarks/results/end_to_end.png)",
        wrapped(alone),
        markdown([*heads, "MLP alone / SparseAdam"], rows),
        "\n".join(beside),
        *([wrapped(setting)] if kept else []),
    ]
    return "\n\n".join(parts)


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    busy = f"runs during which other processes took more than {QUIET:.0%}% of the cores"
    parser.add_argument("--again", type=int, default=10, help=f"repeat up to this many {busy}")
    command_line(end_to_end, parser=parser)
