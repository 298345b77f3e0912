"""Test AUC on the Criteo sample: six clips, and six scaling rules, each at three batch sizes.

Best epoch on the test part, two seeds. Clips with a constant choose it at batch 8192 with a
separate seed. Finished runs in --runs are not repeated.

    python benchmarks/clips_and_scaling.py --data FILE --out benchmarks/results/X.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import get_args

from criteo_runs import ROOT, train
from machine import describe_machine

from stampede.optim import ScalingRule
from stampede.optim.clip import Granularity

BATCHES = (1024, 8192, 32768)
# Without a clip the best epoch comes before the last, except at batch 32768.
EPOCHS = {1024: 4, 8192: 6, 32768: 10}
SEEDS = (1, 2)
CHOOSING_SEED = 100
THRESHOLDS = {
    "global": (1e-5, 1e-4, 1e-3, 1e-2),
    "field": (3e-6, 3e-5, 3e-4, 3e-3),
    "row": (1e-8, 1e-7, 1e-6, 1e-5),
}


class Runs:
    """All runs of the benchmark.

    Args:
        data: Criteo file.
        folder: of the run folders.
    """

    def __init__(self, data: Path, folder: Path) -> None:
        self._data = data
        self._folder = folder
        self._best_epochs: dict[int, list[int]] = {}
        self.thresholds = {clip: self._choose(clip) for clip in THRESHOLDS}

    def auc(self, clip: str, rule: str, batch: int, seed: int) -> float:
        """Best test AUC of a run."""
        # At the base batch size no rule changes anything.
        rule = "cowclip" if batch == BATCHES[0] else rule
        threshold = self.thresholds.get(clip, {}).get("chosen")
        return self._train(clip, threshold, rule, batch, seed)["best_auc"]

    def latest_best_epochs(self) -> dict[int, int]:
        """The latest best epoch of all runs, by batch size."""
        return {batch: max(epochs) for batch, epochs in self._best_epochs.items()}

    def _choose(self, clip: str) -> dict:
        found = {
            threshold: self._train(clip, threshold, "cowclip", 8192, CHOOSING_SEED)["best_auc"]
            for threshold in THRESHOLDS[clip]
        }
        return {"auc_by_threshold": found, "chosen": max(found, key=found.get)}

    def _train(self, clip: str, threshold: float | None, rule: str, batch: int, seed: int) -> dict:
        name = f"{clip}-{rule}-{batch}-{seed}"
        overrides = [
            f"optim.embedding.clip.granularity={clip}",
            f"optim.scaling.rule={rule}",
            f"train.batch_size={batch}",
            f"train.epochs={EPOCHS[batch]}",
            f"run.seed={seed}",
        ]
        if threshold is not None:
            name += f"-{threshold:g}"
            overrides.append(f"optim.embedding.clip.threshold={threshold}")
        summary = train(name, overrides, self._data, self._folder)
        self._best_epochs.setdefault(batch, []).append(summary["best_epoch"])
        return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="criteo_kaggle_137k.tsv.gz")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/clips_and_scaling")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    runs = Runs(arguments.data, arguments.runs)
    tables = {
        "clips": {
            clip: {b: [runs.auc(clip, "cowclip", b, s) for s in SEEDS] for b in BATCHES}
            for clip in get_args(Granularity)
        },
        "scaling_rules": {
            rule: {b: [runs.auc("cowclip", rule, b, s) for s in SEEDS] for b in BATCHES}
            for rule in get_args(ScalingRule)
        },
    }
    report = {
        "machine": describe_machine(),
        "data": arguments.data.name,
        "thresholds": runs.thresholds,
        "epochs": EPOCHS,
        "latest_best_epoch": runs.latest_best_epochs(),
        **tables,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    for title, table in tables.items():
        print_table(title, table)


def print_table(title: str, table: dict) -> None:
    """Mean of the seeds, and each seed."""
    print(f"{title:<16}" + "".join(f"batch {batch:<19}" for batch in BATCHES))
    for name, by_batch in table.items():
        cells = [
            f"{statistics.mean(found):.4f} ({' '.join(f'{auc:.4f}' for auc in found)})"
            for found in by_batch.values()
        ]
        print(f"{name:<16}" + "".join(f"{cell:<25}" for cell in cells))


if __name__ == "__main__":
    main()
