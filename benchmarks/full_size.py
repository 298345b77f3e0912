"""From raw text in Criteo's size to a scored and exported model, at parts of that size.

python benchmarks/full_size.py 0.00390625 0.015625 0.0625 1

Each stage is a process of its own, as a user starts it. Parts measured before stay in the results.
To limit the memory, start it in a cgroup: what its processes may use is that of the shell.
All files are deleted at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from launched import Done, run_program
from machine import OtherProcesses
from report import ROOT, Report, command_line, markdown
from sklearn.metrics import roc_auc_score

from stampede.data.prepared.manifest import read_manifest
from stampede.data.synthetic import CriteoClicks

# Rows from which the attainable AUC is computed, to 0.001.
_ATTAINED_ON = 200_000

# Criteo Kaggle's test part is the last day of seven.
_TEST_SHARE = 1 / 7

# Polars' own scan of the log, to compare the preparation with.
POLARS = """
import sys
import polars as pl
names = ["label"] + [f"I{i}" for i in range(1, 14)] + [f"C{i}" for i in range(1, 27)]
types = {n: pl.Int8 if n == "label" else pl.Float64 if n[0] == "I" else pl.String for n in names}
log = pl.scan_csv(sys.argv[1], has_header=False, separator="\\t", schema=types, quote_char=None)
# In bounded memory; all columns are parsed.
log.select(pl.all().max()).collect(engine="streaming")
"""


def full_size(options: argparse.Namespace, report: Report) -> str:
    """All stages at each part of Criteo Kaggle's size."""
    parts = {}
    if options.out.exists():
        parts = json.loads(options.out.read_text()).get("parts", {})
    attainable = attainable_auc()
    for fraction in [1 / 4096] if options.quick else sorted(options.fractions):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            parts[f"{fraction:g}"] = measured(fraction, options, Path(folder))
        parts = {key: parts[key] for key in sorted(parts, key=float)}
        report.add(attainable_auc=attainable, parts=parts)
    return shown(parts)


def attainable_auc() -> float:
    """Of the true probabilities; whoever sees all hidden weights reaches it."""
    drawn = CriteoClicks().dataset(1, _ATTAINED_ON).test.read(torch.arange(_ATTAINED_ON))
    return float(roc_auc_score(drawn.label.numpy(), drawn.true_probability.numpy()))


def measured(fraction: float, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds, memory and disk of each stage."""
    log, prepared, runs = folder / "train.txt", folder / "prepared", folder / "runs"
    others, stages = OtherProcesses(), {}

    def stage(name: str, rows: int, made: Path | None, *command: str | Path) -> Done:
        print(f"{fraction:g}: {name}", file=sys.stderr, flush=True)
        before = others.seconds()
        done = run_program(list(command))
        stages[name] = {
            "seconds": done.seconds,
            "processor_seconds": done.processor_seconds,
            "rows_per_second": rows / done.seconds if rows else None,
            "peak_bytes": done.peak_bytes,
            "disk_bytes": size_of(made) if made else 0,
            "other_processes": round(others.share(before), 3),
        }
        return done

    synthetic = ["-m", "stampede", "synthetic", folder, "--criteo", str(fraction)]
    done = stage("synthetic", 0, log, *synthetic)
    rows = int(done.said.partition(" of ")[2].split()[0].replace(",", ""))
    stage("polars", rows, None, "-c", POLARS, log)
    prepare = ["prepare", "criteo_kaggle", log, "--out", prepared]
    prepare += ["--set", f"features={options.features}"]
    stage("prepare", rows, prepared, "-m", "stampede", *prepare)
    given = [
        "data.kind=prepared", f"data.path={prepared}", f"run.dir={runs}", "run.name=full",
        f"train.batch_size={options.batch_size}", f"train.epochs={options.epochs}",
        "train.log_every=5", "train.timing_every=5", "evaluate.compare_with_lr=false", *options.set,
    ]  # fmt: skip
    (folder / "full.yaml").write_text("")
    stage("train", 0, runs, ROOT / "launch.py", folder / "full.yaml", *given)
    scored, test = folder / "test.txt", round(rows * _TEST_SHARE)
    with log.open("rb") as source, scored.open("wb") as sink:
        for number, line in enumerate(source):
            if number >= rows - test:
                sink.write(line)
    predict = ["predict", runs / "full", scored, folder / "scores.parquet"]
    stage("predict", test, folder / "scores.parquet", "-m", "stampede", *predict)
    export = ["export", runs / "full", folder / "model"]
    stage("export", 0, folder / "model", "-m", "stampede", *export)
    fields = read_manifest(prepared).fields
    return {
        "rows": rows,
        "log_bytes": log.stat().st_size,
        "table_rows": sum(entry.rows for entry in fields),
        "features": options.features,
        "batch_size": options.batch_size,
        "epochs": options.epochs,
        "stages": stages,
        "training": training(runs / "full"),
    }


def training(run: Path) -> dict[str, Any]:
    """What a run tells of itself: its rate from beginning to end, and seconds outside of steps."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    summary = json.loads((run / "summary.json").read_text())
    outside: Counter[str] = Counter()
    for line in map(json.loads, (run / "logs/rank_0.jsonl").read_text().splitlines()):
        outside.update(line.get("outside_seconds", {}))
    newest = max((run / "checkpoints").iterdir())
    return {
        "test_auc": summary["last"]["test"]["auc"],
        "train_seconds": summary["train_seconds"],
        "samples_per_second": [line["samples_per_second"] for line in steps],
        "outside_seconds": dict(outside),
        "checkpoint_bytes": size_of(newest),
    }


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def shown(parts: dict[str, Any]) -> str:
    """Tables of Markdown."""
    rows = []
    for name, part in parts.items():
        for stage, found in part["stages"].items():
            rate = found["rows_per_second"]
            if stage == "train":
                rate = sum(part["training"]["samples_per_second"]) / len(
                    part["training"]["samples_per_second"]
                )
            rows.append(
                [
                    name,
                    stage,
                    f"{found['seconds']:.0f}",
                    f"{found['processor_seconds']:.0f}",
                    f"{rate:,.0f}" if rate else "",
                    f"{found['peak_bytes'] / 1e9:.2f}",
                    f"{found['disk_bytes'] / 1e9:.2f}",
                    f"{found['other_processes']:.0%}",
                ]
            )
    heads = ["part", "stage", "seconds", "processor seconds", "rows/s", "peak GB", "disk GB"]
    return markdown([*heads, "other processes"], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("fractions", type=float, nargs="*", default=[1 / 256], help="of Criteo Kaggle's rows")
    add("--batch-size", type=int, default=131_072)
    add("--epochs", type=int, default=10)
    add("--set", metavar="KEY=VALUE", action="append", default=[], help="of the training")
    add("--features", default="paper", help="of the log; paper: every id of the log has a row")
    command_line(full_size, parser=parser)
