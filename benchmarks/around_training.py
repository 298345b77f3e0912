"""What comes before and after training: the preparation of a log, and exact metrics.

python benchmarks/around_training.py preparation --rows 1000000 5000000 20000000
OMP_NUM_THREADS=1 python benchmarks/around_training.py metrics
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from launched import Done, run_program
from machine import memory_of_this_process
from report import Report, command_line, markdown
from sklearn.metrics import roc_auc_score

from stampede.data.prepared.manifest import read_manifest
from stampede.data.synthetic import SyntheticClicks, write_criteo_log
from stampede.engine.metrics import PartMetrics

_NAMES = "['label'] + [f'I{i}' for i in range(1, 14)] + [f'C{i}' for i in range(1, 27)]"

POLARS = f"""
import sys
import polars as pl
names = {_NAMES}
types = {{n: pl.Int8 if n == "label" else pl.Float64 if n[0] == "I" else pl.String for n in names}}
pl.read_csv(sys.argv[1], has_header=False, separator="\\t", schema=types, quote_char=None)
"""

# As in the authors' repository (data_utils.py of bytedance/LargeBatchCTR), except for writing the
# result.
PANDAS = f"""
import sys
import pandas as pd
from sklearn.preprocessing import LabelEncoder, MinMaxScaler
names = {_NAMES}
ids, numbers = names[14:], names[1:14]
data = pd.read_csv(sys.argv[1], delimiter="\\t", header=None)
data.columns = names
data[ids] = data[ids].fillna("-1").astype(str)
for name in ids:
    data[name] = LabelEncoder().fit_transform(data[name])
data[numbers] = MinMaxScaler(feature_range=(0, 1)).fit_transform(data[numbers].fillna(0))
rows = int((1 - 1 / 7) * len(data))
data.iloc[:rows].reset_index(drop=True).to_feather(sys.argv[1] + "_train.feather")
data.iloc[rows:].reset_index(drop=True).to_feather(sys.argv[1] + "_test.feather")
print(pd.__version__)
"""


def preparation(options: argparse.Namespace, report: Report) -> str:
    """Preparation of raw Criteo logs of several sizes: seconds, rows/s and memory.

    For comparison: one parse of the file with Polars, and the preparation of the paper's authors,
    which holds everything in memory. Each has its own process.
    """
    runs, shown = [], []
    for rows in [20_000] if options.quick else sorted(options.rows):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            log = Path(folder) / f"{rows}.tsv"
            write_criteo_log(log, rows, SyntheticClicks(scale=1.0))
            # pandas has no memory for more.
            runs.append(prepared(log, rows, options.pandas if rows <= 10_000_000 else []))
        report.add(runs=runs)
    for one in runs:
        ours, polars = (one["seconds"][name] for name in ("ours", "polars"))
        pandas = {n: taken for n, taken in one["seconds"].items() if n.startswith("pandas")}
        row = [f"{one['rows']:,}", f"{one['raw_bytes'] / 1e9:.2f} GB", f"{one['distinct_ids']:,}"]
        row += [f"{ours:.1f}", f"{one['rows'] / ours:,.0f}"]
        row += [f"{one['peak_bytes']['ours'] / 1e9:.2f} GB", f"{ours / polars:.1f}"]
        shown.append([*row, ", ".join(f"{t / ours:.1f} ({n})" for n, t in pandas.items())])
    heads = ["rows", "raw", "distinct ids", "seconds", "rows/s", "peak memory"]
    return markdown([*heads, "ours / Polars", "pandas / ours"], shown)


def prepared(log: Path, rows: int, pandas: list[str]) -> dict:
    """Seconds and peak memory of each way to read a log."""
    folder = log.with_suffix(".prepared")
    ours = ["-m", "stampede.data.prepare_command", "criteo_kaggle", log, "--set", "features=paper"]
    done: dict[str, list[Done]] = {"polars": [], "ours": []}
    # They take turns, so that a change of the machine's speed affects all. Larger logs take
    # minutes, which averages it out.
    for _ in range(3 if rows <= 5_000_000 else 1):
        shutil.rmtree(folder, ignore_errors=True)
        done["polars"].append(run_program(["-c", POLARS, log]))
        done["ours"].append(run_program([*ours, "--out", folder]))
    for python in pandas:
        one = run_program(["-c", PANDAS, log], python=python)
        done[f"pandas {one.said.split()[-1]}"] = [one]
    manifest = read_manifest(folder)
    # All ids of the training part have a row; every field has two more.
    distinct = sum(entry.rows - 2 for entry in manifest.fields)
    return {
        "rows": rows,
        "raw_bytes": log.stat().st_size,
        "distinct_ids": distinct,
        "phases": manifest.source["seconds"],
        "seconds": {n: statistics.median(one.seconds for one in each) for n, each in done.items()},
        "all_seconds": {name: [one.seconds for one in each] for name, each in done.items()},
        "peak_bytes": {name: max(one.peak_bytes for one in each) for name, each in done.items()},
    }


# By name: whether it is ours, and whether it has groups.
CASES = {"ranking": (True, False), "groups": (True, True), "scikit-learn's AUC": (False, False)}


def metrics(options: argparse.Namespace, report: Report) -> str:
    """Processor seconds and memory of exact metrics, against scikit-learn's AUC.

    Scores are like a model's, with one click in five samples; groups are like users, Zipf-
    distributed over a million ids. `ranking` is AUC, PR-AUC, logloss, normalized entropy and
    calibration; `groups` adds GAUC. Each case has its own process; making samples is not counted.
    """
    found: dict = {name: {} for name in CASES}
    for rows in (100_000,) if options.quick else (10_000_000, 20_000_000):
        for name, case in CASES.items():
            with multiprocessing.get_context("spawn").Pool(1) as alone:
                found[name][str(rows)] = alone.apply(cost_of_metrics, (rows, *case))
        report.add(cases=found)
    shown = [
        [name, rows, *(f"{one[key]:.2f}" for key in ("processor_seconds", "memory_gb"))]
        for name, by_rows in found.items()
        for rows, one in by_rows.items()
    ]
    return markdown(["metrics", "samples", "processor seconds", "GB"], shown)


def cost_of_metrics(rows: int, ours: bool, grouped: bool) -> dict[str, float]:
    """Processor seconds, memory without the samples of a piece, and the AUC."""
    pieces, seconds = samples(rows, grouped), 0.0
    if not ours:
        columns = zip(*pieces, strict=True)
        logits, labels = (np.concatenate(next(columns)) for _ in range(2))
        before, start = memory_of_this_process()[1], time.process_time()
        auc = float(roc_auc_score(labels, logits))
        seconds = time.process_time() - start
    else:
        further = ["pr_auc", "normalized_entropy", "calibration", "calibration_buckets"]
        before, found = 0, PartMetrics(further, samples=rows)
        for piece in pieces:
            before, start = before or memory_of_this_process()[1], time.process_time()
            found.add(*piece)
            seconds += time.process_time() - start
        start = time.process_time()
        auc = found.result()["auc"]
        seconds += time.process_time() - start
    memory = (memory_of_this_process()[1] - before) / 1e9
    return {"processor_seconds": seconds, "memory_gb": memory, "auc": auc}


def samples(rows: int, grouped: bool) -> Iterator[tuple[np.ndarray | None, ...]]:
    """Logits, labels, weights and groups, 131072 samples at a time."""
    draw = np.random.default_rng(0)
    for start in range(0, rows, 1 << 17):
        many = min(1 << 17, rows - start)
        logits = draw.standard_normal(many, dtype=np.float32)
        labels = draw.random(many, dtype=np.float32) < 1 / (1 + np.exp(1.6 - logits))
        groups = draw.zipf(1.2, many) % 1_000_000 if grouped else None
        yield logits, labels.astype(np.float32), np.ones(many, np.float32), groups


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = [1_000_000, 5_000_000, 20_000_000]
    parser.add_argument("--rows", type=int, nargs="+", default=sizes, help="of preparation")
    parser.add_argument(
        "--pandas",
        nargs="*",
        default=[sys.executable],
        metavar="PYTHON",
        help="interpreters whose pandas and scikit-learn run the authors' preparation",
    )
    command_line(preparation, metrics, parser=parser)
