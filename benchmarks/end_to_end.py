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
from report import ROOT, Report, begin, picture_path
from speeds import draw, tables
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
    """All contenders of a batch size; those without a bar run once."""
    found = [Contender(batch, "sparse_adam"), Contender(batch, "fp32"), Contender(batch, "bf16")]
    if batch != 8192:
        found.append(Contender(batch, "fp32", rows="touched"))
        found.append(
            Contender(batch, "bf16", rows="touched", **({"repeats": 1} if batch == 1024 else {}))
        )
    found.append(Contender(batch, "sparse_adam", keeps_memory=True, repeats=1))
    found.append(Contender(batch, "dense_adam", repeats=1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, help="runs of each contender; default: 3")
    parser.add_argument("--batches", type=int, nargs="+", help="default: 1024 8192 65536")
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
    repeats = options.repeats or (1 if options.quick else 3)
    batches = options.batches or ((1024,) if options.quick else BATCHES)
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


if __name__ == "__main__":
    main()
