"""Preparation of raw Criteo logs of several sizes: seconds, rows/s and memory.

For comparison, in the same run: one parse of the file with Polars, and the preparation of the
paper's authors (pandas, LabelEncoder and MinMaxScaler; data_utils.py of bytedance/LargeBatchCTR).
The latter holds everything in memory and runs at the smaller sizes only. Each has its own process.
The raw logs and the results are deleted afterwards.

    python benchmarks/preparation.py --rows 1000000 5000000 20000000 --folder /tmp/logs
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import begin, markdown

from stampede.data.prepared.manifest import read_manifest
from stampede.data.synthetic import SyntheticClicks, write_criteo_log

# Larger sizes take minutes, which averages out the machine's speed.
REPEATS, _REPEATED = 3, 5_000_000
# The largest size that pandas has memory for.
_IN_MEMORY = 10_000_000

_NAMES = "['label'] + [f'I{i}' for i in range(1, 14)] + [f'C{i}' for i in range(1, 27)]"

POLARS = f"""
import sys
import polars as pl
names = {_NAMES}
types = {{n: pl.Int8 if n == "label" else pl.Float64 if n[0] == "I" else pl.String for n in names}}
pl.read_csv(sys.argv[1], has_header=False, separator="\\t", schema=types, quote_char=None)
"""

# As in the authors' repository, except for writing the result.
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
data.iloc[:rows].reset_index(drop=True).to_feather(sys.argv[2] + "_train.feather")
data.iloc[rows:].reset_index(drop=True).to_feather(sys.argv[2] + "_test.feather")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = [1_000_000, 5_000_000, 20_000_000]
    parser.add_argument("--rows", type=int, nargs="+", default=sizes)
    parser.add_argument(
        "--pandas",
        nargs="*",
        default=[sys.executable],
        metavar="PYTHON",
        help="interpreters whose pandas and scikit-learn run the authors' preparation",
    )
    options, report = begin("preparation", parser)
    runs = []
    for rows in sorted(options.rows):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            log = Path(folder) / f"{rows}.tsv"
            write_criteo_log(log, rows, SyntheticClicks(scale=1.0))
            repeats = REPEATS if rows <= _REPEATED else 1
            pandas = options.pandas if rows <= _IN_MEMORY else []
            runs.append(_measure(log, rows, repeats, pandas))
        report.add(runs=runs)
    print(table(runs))
    report.close()


def _measure(log: Path, rows: int, repeats: int, pandas: list[str]) -> dict:
    prepared = log.with_suffix(".prepared")
    ours = [sys.executable, "-m", "stampede.data.prepare", "criteo_kaggle", str(log)]
    ours += ["--set", "features=paper"]
    found = {"rows": rows, "raw_bytes": log.stat().st_size}
    seconds: dict[str, list[float]] = {"polars": [], "ours": []}
    peaks: dict[str, int] = {}
    # Take turns, so that a change of the machine's speed affects all.
    for _ in range(repeats):
        shutil.rmtree(prepared, ignore_errors=True)
        for name, command in (
            ("polars", [sys.executable, "-c", POLARS, str(log)]),
            ("ours", [*ours, "--out", str(prepared)]),
        ):
            taken, peak = run_alone(command)
            seconds[name].append(taken)
            peaks[name] = max(peak, peaks.get(name, 0))
    for python in pandas:
        name = f"pandas {_version(python)}"
        taken, peaks[name] = run_alone([python, "-c", PANDAS, str(log), str(log)])
        seconds[name] = [taken]
        for file in log.parent.glob("*.feather"):
            file.unlink()
    # All ids of the training part have a row; every field has two more.
    manifest = read_manifest(prepared)
    found["distinct_ids"] = sum(entry.rows - 2 for entry in manifest.fields)
    found["phases"] = manifest.source["seconds"]
    found["seconds"] = {name: statistics.median(values) for name, values in seconds.items()}
    found["all_seconds"] = seconds
    found["peak_bytes"] = peaks
    found["allowed_bytes"] = int(2e9 + 64 * found["distinct_ids"])
    return found


def _version(python: str) -> str:
    program = "import pandas; print(pandas.__version__)"
    return subprocess.run(
        [python, "-c", program], capture_output=True, text=True, check=True
    ).stdout.strip()


# Until exec, a process counts its parent's memory as its own. So a small process starts the command
# and asks for its children's memory.
STARTER = """
import resource, subprocess, sys
status = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
sys.exit(status)
"""


def run_alone(command: list[str]) -> tuple[float, int]:
    """Seconds including the start of the process, and its peak resident set in bytes."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-S", "-c", STARTER, *command], capture_output=True, text=True
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{command[:3]} failed:\n{done.stderr[-2000:]}")
    return seconds, int(done.stdout)


def table(runs: list[dict]) -> str:
    """The manual's table; the last column is the speed-up over pandas."""
    heads = ["rows", "raw GB", "distinct ids", "seconds", "rows/s", "peak RSS GB", "allowed GB"]
    rows = []
    for run in runs:
        seconds, peak = run["seconds"], run["peak_bytes"]
        ours = seconds["ours"]
        pandas = ", ".join(
            f"{value / ours:.1f} ({name.split()[1]})"
            for name, value in seconds.items()
            if name.startswith("pandas")
        )
        rows.append(
            [
                f"{run['rows']:,}",
                f"{run['raw_bytes'] / 1e9:.2f}",
                f"{run['distinct_ids']:,}",
                f"{ours:.1f}",
                f"{run['rows'] / ours:,.0f}",
                f"{peak['ours'] / 1e9:.2f}",
                f"{run['allowed_bytes'] / 1e9:.2f}",
                f"{ours / seconds['polars']:.1f}",
                pandas,
            ]
        )
    return markdown([*heads, "Polars", "pandas"], rows)


if __name__ == "__main__":
    main()
