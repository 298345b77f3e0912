"""Cost of periods: the hundredth against the tenth, and the share of training.

The logs are synthetic clicks with drifting ids, in Criteo's layout.

    python benchmarks/many_periods.py
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import CORES
from report import ROOT, begin, markdown, wrapped

from stampede.data.synthetic import SyntheticClicks, write_criteo_log

CONFIG = ROOT / "configs/criteo_kaggle.yaml"

# Criteo's layout with four of its id fields, which have many ids.
SCHEMA = """\
format: csv
separator: "\\t"
columns: [label, {numbers}, {ids}]
label: label
ids: [C3, C4, C12, C16]
"""

# Clock ticks per second; the system counts processor time in ticks.
_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    options, report = begin("many_periods", __doc__)
    folder = options.folder / "many_periods"
    shutil.rmtree(folder, ignore_errors=True)
    periods, rows = (20, 1000) if options.quick else (100, 5000)
    # One in fifty ids is new every day; a table keeps 2,000 ids.
    folder.mkdir()
    schema = folder / "schema.yaml"
    names = {what: ", ".join(f"{letter}{i + 1}" for i in range(count))
             for what, letter, count in (("numbers", "I", 13), ("ids", "C", 26))}  # fmt: skip
    schema.write_text(SCHEMA.format(**names))
    keys = ("data.kind=table", f"data.schema_file={schema}", "data.max_rows=2000")
    lines = trained(folder / "many", periods, rows, 0.02, *keys)
    report.add(many=early_and_late(lines))
    rows = 20_000 if options.quick else 1_000_000
    lines = trained(folder / "large", 2, rows, 0.05)
    report.add(large=lines[-1])
    print(tables({**report.found, "machine": {"other_processes": report.others.share()}}))
    report.close()


def early_and_late(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians of the second tenth of the periods, and of the last tenth."""
    tenth = len(lines) // 10
    names = ("cpu_seconds", "seconds", "ids", "peak_memory_bytes")
    return [
        {
            "periods": [part[0]["period"], part[-1]["period"]],
            "rows": part[0]["rows"],
            **{name: statistics.median(line[name] for line in part) for name in names},
        }
        for part in (lines[tenth - 1 : 2 * tenth - 1], lines[-tenth:])
    ]


def trained(
    folder: Path, periods: int, rows: int, drift: float, *overrides: str
) -> list[dict[str, Any]]:
    """Lines of a log's periods, with the processor seconds of each."""
    (folder / "logs").mkdir(parents=True)
    for number in range(periods):
        path = folder / f"logs/day_{number + 1}.tsv"
        write_criteo_log(path, rows, SyntheticClicks(), number, drift)
    log, metrics = folder / "output.txt", folder / "run/metrics.jsonl"
    command = [
        sys.executable, "-m", "stampede.engine.incremental", CONFIG,
        f"data.path={folder}/logs/*.tsv", f"run.dir={folder}", "run.name=run", *overrides,
    ]  # fmt: skip
    ends: list[float] = []
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
        while process.poll() is None:
            time.sleep(0.05)
            done = _periods(metrics)
            ends += [_cpu_seconds(process.pid)] * (len(done) - len(ends))
    if process.returncode:
        sys.exit(log.read_text(errors="replace")[-2000:])
    lines = _periods(metrics)
    starts = [0.0, *ends]
    return [
        {**line, "cpu_seconds": end - start}
        for line, start, end in zip(lines, starts, ends, strict=False)
    ]


def _periods(metrics: Path) -> list[dict[str, Any]]:
    text = metrics.read_text() if metrics.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if line["kind"] == "period"]


def _cpu_seconds(process: int) -> float:
    """Processor seconds of all threads, which other programs hardly change."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("nan")
    return (int(fields[11]) + int(fields[12])) / _TICKS


def tables(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows = [
        [
            "{} to {}".format(*part["periods"]),
            f"{part['cpu_seconds']:.1f}",
            f"{part['ids']:,.0f}",
            f"{part['peak_memory_bytes'] / 1e9:.2f} GB",
        ]
        for part in found["many"]
    ]
    busy = found["machine"]["other_processes"]
    parts = [
        wrapped(
            f"A hundred files of {found['many'][0]['rows']:,} rows and four fields, one in fifty "
            "ids new in each, at most 2,000 rows of a field (`benchmarks/many_periods.py`; "
            f"medians; other programs took {busy:.0%} of the cores' time):"
        ),
        markdown(["period", "processor seconds", "rows of all tables", "memory at most"], rows),
    ]
    if large := found.get("large"):
        shares = sorted(large["part_seconds"].items(), key=lambda one: -one[1])
        parts.append(
            wrapped(
                f"Of the time of a period of {large['rows']:,} rows with {large['ids']:,} ids: "
                + ", ".join(f"{part} {s / large['seconds']:.0%}" for part, s in shares)
                + "."
            )
        )
    return "\n\n".join(parts)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(CORES))
    main()
