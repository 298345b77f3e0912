"""Best test AUC with the dense layers in bf16 and in fp32, on the real Criteo sample.

CowClip at batch 1024, five seeds, best epoch on the test part; means with standard errors, and the
paired differences of the seeds. Speed is not measured: one run per core at a time.

    python benchmarks/bf16_auc.py --data ../shared/data/criteo_kaggle_137k.tsv.gz
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from launched import launch
from machine import CORES, describe_machine
from report import ROOT, begin, markdown, wrapped
from tqdm import tqdm

CONFIG = ROOT / "configs/criteo_kaggle.yaml"
DATA = ROOT.parent / "shared/data/criteo_kaggle_137k.tsv.gz"
PRECISIONS = ("fp32", "bf16")
SEEDS = (1, 2, 3, 4, 5)

# The best epoch is the second.
EPOCHS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="criteo_kaggle_137k.tsv.gz")
    options, report = begin("bf16_auc", parser)
    if not options.data.exists():
        print(f"left out: {options.data} does not exist; name the Criteo sample with --data")
        return
    if not describe_machine()["bf16_instructions"]:
        print("left out: this CPU has no instructions for bf16")
        return
    seeds, epochs = (SEEDS[:2], 1) if options.quick else (SEEDS, EPOCHS)
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        runs = measure(options.data, Path(scratch), seeds, epochs)
    report.add(data=options.data.name, seeds=seeds, epochs=epochs, **summarize(runs))
    print(tables(report.found))
    report.close()


def measure(
    data: Path, scratch: Path, seeds: tuple[int, ...], epochs: int
) -> dict[str, list[dict]]:
    """Summaries of all runs by precision, in the order of the seeds."""

    def train(precision: str, seed: int) -> dict:
        overrides = [
            f"data.path={data}",
            f"data.cache={scratch / 'cache'}",
            "evaluate.select_on=test",
            "train.batch_size=1024",
            f"train.epochs={epochs}",
            f"run.seed={seed}",
        ]
        return launch(CONFIG, precision, overrides, scratch / f"{precision}-{seed}", threads=1)

    jobs = [(precision, seed) for seed in seeds for precision in PRECISIONS]
    found: dict[str, list[dict]] = {precision: [] for precision in PRECISIONS}
    with (
        tqdm(desc="bf16 AUC", unit="run", total=len(jobs), ncols=100) as bar,
        ThreadPoolExecutor(CORES) as pool,
    ):
        # The first run prepares the data that the others share.
        first = train(*jobs[0])
        others = pool.map(lambda job: train(*job), jobs[1:])
        for (precision, _), summary in zip(jobs, chain([first], others), strict=True):
            found[precision].append(summary)
            bar.update()
    return found


def summarize(runs: dict[str, list[dict]]) -> dict:
    """AUC of each seed, means, standard errors, and the differences bf16 - fp32."""
    best = {p: [summary["best_auc"] for summary in summaries] for p, summaries in runs.items()}
    differences = [b - a for a, b in zip(best["fp32"], best["bf16"], strict=True)]
    return {
        "best_auc": best,
        "best_epochs": {p: [s["best_epoch"] for s in summaries] for p, summaries in runs.items()},
        "mean": {p: statistics.mean(each) for p, each in best.items()},
        "standard_error": {p: _standard_error(each) for p, each in best.items()},
        "difference": statistics.mean(differences),
        "standard_error_of_difference": _standard_error(differences),
    }


def _standard_error(values: list[float]) -> float:
    """The standard error of the mean of independent values."""
    return statistics.stdev(values) / math.sqrt(len(values))


def tables(found: dict) -> str:
    """The results as Markdown."""
    rows = [
        [
            precision,
            " ".join(f"{auc:.4f}" for auc in best),
            f"{found['mean'][precision]:.4f}",
            f"{found['standard_error'][precision]:.4f}",
        ]
        for precision, best in found["best_auc"].items()
    ]
    said = (
        "Best test AUC on the Criteo sample, CowClip at batch 1024; bf16 - fp32 is "
        f"{found['difference']:+.5f}, with a standard error of "
        f"{found['standard_error_of_difference']:.5f} over the pairs of seeds:"
    )
    return f"{wrapped(said)}\n\n{markdown(['', 'each seed', 'mean', 'standard error'], rows)}"


if __name__ == "__main__":
    main()
