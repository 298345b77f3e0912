"""Seconds and memory of exact metrics, against scikit-learn's AUC.

Scores are like a model's, with one click in five samples; groups are like users, Zipf-distributed
over a million ids. `ranking` is AUC, PR-AUC, logloss, normalized entropy and calibration; `groups`
adds GAUC. Each case has its own process; samples come 131072 at a time, and making them is not
counted. Cases take turns; the fastest repeat is reported, with its processor time.

    OMP_NUM_THREADS=1 python benchmarks/metrics.py
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from machine import memory_of_this_process
from report import begin
from sklearn.metrics import roc_auc_score

from stampede.engine.metrics import PartMetrics

ROWS = (10_000_000, 20_000_000)
AT_A_TIME = 1 << 17
REPEATS = 2
FURTHER = ["pr_auc", "normalized_entropy", "calibration", "calibration_buckets"]
# By name: whether it is ours, and whether it has groups.
CASES = {"ranking": (True, False), "groups": (True, True), "scikit-learn's AUC": (False, False)}


def main() -> None:
    options, report = begin("metrics", __doc__)
    found: dict = {}
    for rows in (100_000,) if options.quick else ROWS:
        for _ in range(REPEATS):
            for name, case in CASES.items():
                with multiprocessing.get_context("spawn").Pool(1) as alone:
                    one = alone.apply(measure, (rows, *case))
                best = found.setdefault(name, {}).setdefault(str(rows), one)
                for key in ("seconds", "processor_seconds"):
                    best[key] = min(best[key], one[key])
        for name in CASES:
            best = found[name][str(rows)]
            print(
                f"{rows:>11,} rows  {name:<20}{best['seconds']:>7.2f} s"
                f"{best['processor_seconds']:>7.2f} s{best['memory_gb']:>7.2f} GB"
                f"  AUC {best['auc']:.6f}",
                flush=True,
            )
        report.add(cases=found)
    report.close()


def measure(rows: int, ours: bool, grouped: bool) -> dict:
    """Seconds, memory of the metrics without the samples of a piece, and the AUC."""
    seconds, processor_seconds = 0.0, 0.0

    def timed(call: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal seconds, processor_seconds
        start = time.perf_counter(), time.process_time()
        result = call(*arguments)
        seconds += time.perf_counter() - start[0]
        processor_seconds += time.process_time() - start[1]
        return result

    pieces = samples(rows, grouped)
    if not ours:
        pieces = list(pieces)
        logits, labels = (np.concatenate([piece[column] for piece in pieces]) for column in (0, 1))
        del pieces
        before = memory_of_this_process()[1]
        auc = float(timed(roc_auc_score, labels, logits))
    else:
        before = 0
        metrics = PartMetrics(FURTHER, samples=rows)
        for piece in pieces:
            before = before or memory_of_this_process()[1]
            timed(metrics.add, *piece)
        auc = timed(metrics.result)["auc"]
    return {
        "seconds": seconds,
        "processor_seconds": processor_seconds,
        "memory_gb": (memory_of_this_process()[1] - before) / 1e9,
        "auc": auc,
    }


def samples(rows: int, grouped: bool) -> Iterator[tuple[np.ndarray | None, ...]]:
    """Logits, labels, weights and groups, piece by piece."""
    draw = np.random.default_rng(0)
    for start in range(0, rows, AT_A_TIME):
        count = min(AT_A_TIME, rows - start)
        logits = draw.standard_normal(count, dtype=np.float32)
        labels = draw.random(count, dtype=np.float32) < 1 / (1 + np.exp(1.6 - logits))
        groups = draw.zipf(1.2, count) % 1_000_000 if grouped else None
        yield logits, labels.astype(np.float32), np.ones(count, np.float32), groups


if __name__ == "__main__":
    main()
