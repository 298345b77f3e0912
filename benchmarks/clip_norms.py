"""How far gradients are from CowClip's threshold, by how often an id occurs in the batch.

Trains with the paper's settings, on Criteo's sample and on synthetic clicks of its shape, or takes
run folders with `train.clip_stats_every`, and reads the lines `clipping` of `metrics.jsonl`: mean
norms of gradients (L2 term included), of rows and of thresholds, and the share of clipped rows, in
the first and the last quarter of the training.

    python benchmarks/clip_norms.py --data ../shared/data/criteo_kaggle_137k.tsv.gz
    python benchmarks/clip_norms.py --runs runs/synthetic_rules/trials/CowClip-*K-seed1
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launched import run_program
from report import ROOT, Report, begin

from stampede.engine.clip_watch import NORMS

BATCHES = (1024, 8192, 65536)

# The clicks of configs/sweeps/synthetic_rules.yaml, with fewer rows and ids.
SYNTHETIC = [
    "data.test_rows=50000", "data.validation_fraction=0.05", "data.scale=0.02", "data.zipf=1.05",
    "data.numbers_std=0.6", "data.first_order_std=1.35", "data.interactions_std=0.7",
    "optim.embedding.lr=1e-3", "optim.dense.lr=1e-3",
]  # fmt: skip

# Lines of a training are about this many.
LINES = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--data", type=Path, help="criteo_kaggle_137k.tsv.gz")
    what.add_argument("--runs", type=Path, nargs="+", help="run folders")
    options, report = begin("clip_norms", parser)
    if options.runs:
        for run in options.runs:
            _add(report, run.name, _lines(run))
    else:
        _train_all(options, report)
    report.close()


def _train_all(options: argparse.Namespace, report: Report) -> None:
    drawn = 200_000 if options.quick else 2_000_000
    logs = {
        "Criteo": ("criteo_kaggle.yaml", 105_793, 4, [f"data.path={options.data.resolve()}"]),
        "synthetic": ("quickstart.yaml", drawn * 19 // 20, 2, [*SYNTHETIC, f"data.rows={drawn}"]),
    }
    for log, (config, rows, epochs, overrides) in logs.items():
        for batch in BATCHES[-1:] if options.quick else BATCHES:
            steps = epochs * -(-rows // batch)
            chosen = ["preset=paper", f"train.epochs={epochs}", f"train.batch_size={batch}"]
            lines = _train(config, [*overrides, *chosen], steps, options.folder)
            _add(report, f"{log} {batch}", lines)


def _add(report: Report, name: str, lines: Sequence[dict[str, Any]]) -> None:
    quarter = -(-len(lines) // 4)
    found = {"first": _by_count(lines[:quarter]), "last": _by_count(lines[-quarter:])}
    report.add(**{name: found})
    _print(name, found)


def _train(config: str, overrides: list[str], steps: int, folder: Path) -> list[dict[str, Any]]:
    """The counts of clipped rows of a training."""
    run = folder / "clip_norms"
    place = [f"run.dir={folder}", f"run.name={run.name}", "run.overwrite=true"]
    watched = [f"train.clip_stats_every={-(-steps // LINES)}"]
    watched += ["evaluate.every=0", "evaluate.compare_with_lr=false"]
    program = [ROOT / "launch.py", ROOT / "configs" / config]
    try:
        run_program([*program, *overrides, *watched, *place])
        return _lines(run)
    finally:
        shutil.rmtree(run, ignore_errors=True)


def _lines(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "clipping"]


def _by_count(lines: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Means over the rows of several steps, by the occurrences of their ids."""
    sums: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for count in (count for line in lines for count in line["counts"]):
        total = sums[count["from"]]
        total["rows"] += count["touched"]
        total["clipped"] += count["clipped"]
        for name in NORMS:
            total[name] += count["touched"] * count[name]
    return [
        {"from": first, "rows": total["rows"]}
        | {name: total[name] / total["rows"] for name in ("clipped", *NORMS)}
        for first, total in sorted(sums.items())
    ]


def _print(title: str, found: dict[str, list[dict[str, float]]]) -> None:
    for when, counts in found.items():
        print(f"\n{title}, {when} quarter")
        heads = "".join(f"{name:>15}" for name in NORMS)
        print(f"{'occurrences':>12}{'rows':>12}{'clipped':>10}{heads}")
        for count in counts:
            numbers = "".join(f"{count[name]:>15.2e}" for name in NORMS)
            rows = f"{count['from']:>12,}{count['rows']:>12,.0f}"
            print(f"{rows}{count['clipped']:>10.3%}{numbers}")


if __name__ == "__main__":
    main()
