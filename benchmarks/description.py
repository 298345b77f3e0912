"""Seconds and memory of `stampede.data.describe` on raw Criteo logs, against a parse with Polars.

python benchmarks/description.py --folder /tmp/logs --out benchmarks/results/description.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from pathlib import Path

from machine import describe_machine
from preparation import POLARS, run_alone

from stampede.data.synthetic import SyntheticClicks, write_criteo_log

REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[500_000, 1_000_000])
    parser.add_argument("--folder", type=Path, required=True, help="for logs; deleted afterwards")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    runs = []
    try:
        for rows in arguments.rows:
            log = arguments.folder / f"{rows}.tsv"
            write_criteo_log(log, rows, SyntheticClicks(scale=1.0))
            out = ["--out", str(arguments.folder / "description")]
            describe = [sys.executable, "-m", "stampede.data.describe", str(log), *out]
            polars = [sys.executable, "-c", POLARS, str(log)]
            ours, parse = (
                [run_alone(command) for _ in range(REPEATS)] for command in (describe, polars)
            )
            runs.append(
                {
                    "rows": rows,
                    "seconds": statistics.median(seconds for seconds, _ in ours),
                    "polars_seconds": statistics.median(seconds for seconds, _ in parse),
                    "peak_bytes": max(peak for _, peak in ours),
                }
            )
    finally:
        shutil.rmtree(arguments.folder)
    report = {"machine": describe_machine(), "runs": runs}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
