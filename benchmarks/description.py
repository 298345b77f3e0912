"""Seconds and memory of `stampede.data.describe` on raw Criteo logs, against a parse with Polars.

python benchmarks/description.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from preparation import POLARS, run_alone
from report import begin

from stampede.data.synthetic import SyntheticClicks, write_criteo_log

REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[500_000, 1_000_000])
    options, report = begin("description", parser)
    runs = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for rows in options.rows:
            log = Path(folder) / f"{rows}.tsv"
            write_criteo_log(log, rows, SyntheticClicks(scale=1.0))
            out = ["--out", f"{folder}/description"]
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
            report.add(runs=runs)
            print(runs[-1])
    report.close()


if __name__ == "__main__":
    main()
