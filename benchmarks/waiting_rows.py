"""Sweeping all rows in each step against letting rows wait: where each is cheaper.

`rows: all`, forward and backward of 26 tables of 12 columns with the final flush, by numbers of ids
and samples. Training chooses by the ratio of all rows to distinct rows of a batch
(`stampede.optim.waiting_rows`).

    python benchmarks/waiting_rows.py
"""

from __future__ import annotations

import statistics
import sys
from unittest import mock

from clicks import FIELDS, cardinalities
from report import begin, markdown, wrapped
from timing import interleaved
from tqdm import tqdm
from update_kernel import DIM, Lookups, ours, window

from stampede.optim import native
from stampede.optim import waiting_rows as rule
from support.updated_tables import computed

IDS = (30_000, 100_000, 300_000, 1_000_000, 2_600_000)
BATCHES = (1024, 4096, 16_384, 65_536)

# Samples of a window: at least 32 steps, at most 512.
SAMPLES = 1 << 21


def main() -> None:
    options, report = begin("waiting_rows", __doc__)
    if not native.available():
        sys.exit("error: the CPU kernels cannot be compiled here: a C++17 compiler must be in PATH")
    sizes, batches = (IDS[:2], BATCHES[:1]) if options.quick else (IDS, BATCHES)
    points = [(ids, batch) for ids in sizes for batch in batches]
    found: list[dict] = []
    for ids, batch in tqdm(points, desc="waiting rows", unit="point", ncols=100):
        found.append(measure(ids, batch, repeats=1 if options.quick else 3))
        report.add(
            columns=DIM,
            fields=FIELDS,
            rows_a_touched_row=rule.ROWS_A_TOUCHED_ROW,
            fewest_rows=rule.FEWEST_ROWS,
            points=found,
        )
    print(tables(report.found))
    report.close()


def measure(ids: int, batch: int, repeats: int) -> dict:
    """Seconds a step of both ways, and the chosen way."""
    sizes = cardinalities(ids)
    steps = max(32, min(512, SAMPLES // batch))
    lookups = Lookups(batch, sizes, min(steps, 64))
    rows = sum(sizes)
    with computed("waiting", rule.WINDOW):
        waiting = ours(sizes, "all")
    with computed("kernels"):
        swept = ours(sizes, "all")
    run_waiting = window(waiting, lookups, steps)

    def never_swept() -> float:
        # Asked at each step.
        with mock.patch.object(rule, "ROWS_A_TOUCHED_ROW", 0):
            return run_waiting()

    taken = interleaved({"waiting": never_swept, "swept": window(swept, lookups, steps)}, repeats)
    is_swept = rows < rule.FEWEST_ROWS or rule.sweeps_all(lookups.distinct, rows)
    return {
        "ids": rows,
        "batch": batch,
        "steps": steps,
        "distinct_ids": lookups.distinct,
        "seconds_per_step": {name: statistics.median(all_) / steps for name, all_ in taken.items()},
        "all_seconds": taken,
        "chosen": "swept" if is_swept else "waiting",
    }


def chosen_to_better(point: dict) -> float:
    """Time of the chosen way relative to the better one; 1 if the better one is chosen."""
    seconds = point["seconds_per_step"]
    return seconds[point["chosen"]] / min(seconds.values())


def tables(found: dict) -> str:
    """The results as Markdown."""
    rows = [
        [
            f"{one['ids']:,}",
            f"{one['batch']:,}",
            f"{one['ids'] / one['distinct_ids']:.1f}",
            *(f"{1e3 * one['seconds_per_step'][name]:.1f}" for name in ("waiting", "swept")),
            one["chosen"],
        ]
        for one in found["points"]
    ]
    worst = max(map(chosen_to_better, found["points"]))
    said = (
        "`rows: all`, rows that wait beside a sweep of all rows in each step: milliseconds of "
        "forward and backward of the tables, with the last flush. The chosen way takes at most "
        f"{worst:.2f} times as long as the better of the two:"
    )
    heads = ["ids", "batch", "ids / distinct ids", "waiting", "swept", "chosen"]
    return f"{wrapped(said)}\n\n{markdown(heads, rows)}"


if __name__ == "__main__":
    main()
