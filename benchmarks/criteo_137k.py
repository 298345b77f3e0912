"""AUC on the 137,139-row Criteo sample, against the authors' TensorFlow code on the same rows.

Best epoch of 10 on the test part, the paper's way. Three settings: baseline Adam without clipping
at batch 1024, CowClip at 1024, CowClip with its scaling rule at 8192. Finished runs in --runs with
the same configuration are not repeated.

    python benchmarks/criteo_137k.py --data FILE --reference JSON --out benchmarks/results/X.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from criteo_runs import ROOT, train
from machine import describe_machine

SETTINGS = {
    "baseline_1024": [
        "train.batch_size=1024",
        "optim.embedding.clip=null",
        "optim.dense.lr=1e-4",
        "optim.dense.schedule.warmup=0",
        "model.init_std=1e-4",
        "optim.scaling.rule=none",
    ],
    "cowclip_1024": ["train.batch_size=1024"],
    "cowclip_8192": ["train.batch_size=8192"],
}
SEEDS = {"baseline_1024": 3, "cowclip_1024": 3, "cowclip_8192": 5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="criteo_kaggle_137k.tsv.gz")
    parser.add_argument("--reference", type=Path, required=True, help="the authors' figures, JSON")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/criteo_137k")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    reference = json.loads(arguments.reference.read_text())["summary"]
    results = {}
    for setting, overrides in SETTINGS.items():
        runs = [
            train(
                f"{setting}_{seed}",
                [*overrides, f"run.seed={seed}"],
                arguments.data,
                arguments.runs,
            )
            for seed in range(1, SEEDS[setting] + 1)
        ]
        best = [run["best_auc"] for run in runs]
        results[setting] = {
            "best_auc": best,
            "best_auc_mean": statistics.mean(best),
            "best_auc_stdev": statistics.stdev(best),
            "min_logloss_mean": statistics.mean(run["min_logloss"] for run in runs),
            "best_epochs": [run["best_epoch"] for run in runs],
            "reference_best_auc_mean": reference[setting]["best_auc_mean"],
            "reference_min_logloss_mean": reference[setting]["min_logloss_mean"],
            "overrides": overrides,
        }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": describe_machine(), "data": arguments.data.name, "settings": results}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print_table(results)


def print_table(results: dict) -> None:
    print(
        "setting          best AUC (each seed)                         mean     authors' TensorFlow"
    )
    for setting, found in results.items():
        each = " ".join(f"{auc:.4f}" for auc in found["best_auc"])
        print(
            f"{setting:<15}  {each:<43}  {found['best_auc_mean']:.4f}   "
            f"{found['reference_best_auc_mean']:.4f}"
        )


if __name__ == "__main__":
    main()
