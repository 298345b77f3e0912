"""Prediction against training: rows per second of processor time, on synthetic clicks.

DeepFM on a raw Criteo log, batch 8192. launch.py trains one epoch and three; the processor time of
the two additional epochs, with evaluations, gives training's samples a second.
stampede.engine.predict scores a tenth of the raw log, the whole log, and the parts of the prepared
data; the differences exclude starting and loading. Processor time is reported because other
processes change wall time; the wall-clock rows/s that predict prints are in the results too.
Contenders take turns; results are medians.

    python benchmarks/prediction.py
"""

from __future__ import annotations

import re
import resource
import shutil
import statistics
from pathlib import Path
from typing import NamedTuple

from launched import run_program
from report import ROOT, begin

from stampede.data.prepared.manifest import read_manifest
from stampede.data.synthetic import SyntheticClicks, write_criteo_log

ROWS, REPEATS = 300_000, 3


class Run(NamedTuple):
    """Processor seconds of a process, and what it printed."""

    seconds: float
    said: str


def main() -> None:
    options, report = begin("prediction", __doc__)
    rows = 50_000 if options.quick else ROWS
    folder = options.folder / "prediction"
    folder.mkdir(parents=True, exist_ok=True)
    log, tenth = folder / f"clicks-{rows}.tsv", folder / f"clicks-{rows}-tenth.tsv"
    if not log.exists():
        write_criteo_log(log, rows, SyntheticClicks(scale=1.0))
    with log.open("rb") as whole, tenth.open("wb") as part:
        part.writelines(line for line, _ in zip(whole, range(rows // 10), strict=False))
    rates: dict[str, list[float]] = {"training": [], "raw log": [], "prepared part": []}
    printed: list[float] = []
    try:
        for _ in range(1 if options.quick else REPEATS):
            one, three = (_train(folder, log, epochs) for epochs in (1, 3))
            sizes = _part_sizes(folder)
            rates["training"].append(2 * sizes["train"] / (three.seconds - one.seconds))
            few, many = (_predict(folder, [path]) for path in (tenth, log))
            rates["raw log"].append((rows - rows // 10) / (many.seconds - few.seconds))
            printed.append(_speed(many.said))
            few, many = (_predict(folder, ["@run", "--part", p]) for p in ("test", "train"))
            more = sizes["train"] - sizes["test"]
            rates["prepared part"].append(more / (many.seconds - few.seconds))
    finally:
        for left in ("run", "cache"):
            shutil.rmtree(folder / left, ignore_errors=True)
    medians = {name: round(statistics.median(found)) for name, found in rates.items()}
    ratios = {name: round(rate / medians["training"], 2) for name, rate in medians.items()}
    report.add(
        rows=rows,
        rows_per_processor_second=rates,
        medians=medians,
        ratio_to_training=ratios,
        rows_per_second_printed=printed,
    )
    for name, rate in medians.items():
        print(f"{name:<14} {rate:>9,} rows per processor second  {ratios[name]:.2f} x training")
    report.close()


def _train(folder: Path, log: Path, epochs: int) -> Run:
    return _timed(
        [
            ROOT / "launch.py",
            ROOT / "configs/criteo_kaggle.yaml",
            "preset=paper",
            f"data.path={log}",
            f"data.cache={folder / 'cache'}",
            f"train.epochs={epochs}",
            f"run.dir={folder}",
            "run.name=run",
            "run.overwrite=true",
        ]
    )


def _part_sizes(folder: Path) -> dict[str, int]:
    (prepared,) = (folder / "cache").iterdir()
    manifest = read_manifest(prepared)
    return {part: manifest.rows(part) for part in manifest.parts}


def _predict(folder: Path, inputs: list[str | Path]) -> Run:
    output = folder / "scores.parquet"
    run = _timed(["-m", "stampede.engine.predict", folder / "run", *inputs, output])
    output.unlink()
    return run


def _timed(command: list[str | Path]) -> Run:
    before = _processor_seconds()
    said = run_program(command)
    return Run(_processor_seconds() - before, said)


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _speed(said: str) -> float:
    return float(re.search(r"([\d,]+) rows/s", said)[1].replace(",", ""))


if __name__ == "__main__":
    main()
