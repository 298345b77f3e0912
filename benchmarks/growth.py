"""How a training step grows with the batch, with ids and with fields, and memory per id.

launch.py's steps with CowClip and `rows: all` in fp32, with the last flush; also after many steps,
when moments of untouched rows have decayed. Each point has its own process, so its peak memory is
from training alone.

    python benchmarks/growth.py
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import launchers_allocator  # noqa: F401
import torch
from clicks import FIELDS, IDS, write_clicks
from machine import CORES, memory_of_this_process
from report import begin, markdown, wrapped
from tqdm import tqdm
from training import training

from stampede.optim import local_cowclip_tables

BATCH = 8192
ROWS = 1 << 18

# The varied sizes; others stay at BATCH, IDS and FIELDS. `trained` are steps before the measured
# ones.
SERIES = {
    "batch": (1024, 4096, 16_384, 65_536, 131_072),
    "ids": (1_000_000, 3_000_000, 10_000_000, 30_000_000),
    "fields": (13, 26, 52),
    "trained": (0, 1000, 2000),
}
# Their units, if not their names.
GROWN = {"batch": "samples", "trained": "steps trained before"}
QUICK = {"batch": (4096,), "ids": (100_000, 1_000_000), "fields": (13,), "trained": (8,)}


def main() -> None:
    options, report = begin("growth", __doc__)
    series = QUICK if options.quick else SERIES
    found: dict[str, dict[str, dict]] = {name: {} for name in series}
    points = [(name, value) for name, values in series.items() for value in values]
    for name, value in tqdm(points, desc="growth", unit="point", ncols=100):
        point = {"batch": BATCH, "ids": IDS, "fields": FIELDS, "trained": 0, name: value}
        if options.quick and name != "ids":
            point["ids"] = QUICK["ids"][0]
        rows = max(QUICK["batch"]) if options.quick else ROWS
        clicks = write_clicks(options.folder, rows, point["ids"], point["fields"])
        # A whole epoch.
        steps = max(rows // point["batch"], 2)
        found[name][str(value)] = in_a_process(clicks, point["batch"], steps, point["trained"])
        report.add(batch=BATCH, ids=IDS, fields=FIELDS, rows=rows, growth=found)
    report.add(bytes_per_id=bytes_per_id(found["ids"]))
    print(tables(report.found))
    report.close()


def in_a_process(clicks: Path, batch: int, steps: int, trained: int) -> dict:
    """`measure` in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        result = pool.apply(measure, (clicks, batch, steps, trained))
        # Wait for its end, so that its processor time counts as this benchmark's.
        pool.close()
        pool.join()
    return result


def measure(clicks: Path, batch: int, steps: int, trained: int = 0) -> dict:
    """Seconds a step, and memory, after `trained` steps."""
    torch.set_num_threads(CORES)
    before, _ = memory_of_this_process()
    overrides = [f"train.batch_size={batch}"]
    with training(clicks, overrides) as job:
        job.seconds(2 + trained)
        seconds = job.seconds(steps)
        arrays = [a for tables in local_cowclip_tables(job.job.model) for a in tables.arrays]
        held = sum(tensor.nbytes for array in arrays for tensor in array.all_tensors())
        ids = sum(len(array.weights) for array in arrays)
    _, peak = memory_of_this_process()
    return {
        "ids": ids,
        "steps": steps,
        "seconds_per_step": seconds / steps,
        "samples_per_second": batch * steps / seconds,
        "table_bytes": held,
        "peak_bytes": peak,
        "peak_bytes_of_training": peak - before,
    }


def bytes_per_id(by_ids: dict[str, dict]) -> float:
    """Growth of the peak memory per id, from the fewest ids to the most."""
    fewest, most = (by_ids[key] for key in (min(by_ids, key=int), max(by_ids, key=int)))
    return (most["peak_bytes"] - fewest["peak_bytes"]) / (most["ids"] - fewest["ids"])


def tables(found: dict) -> str:
    """The results as Markdown."""
    rows = [
        [
            f"{int(value):,} {GROWN.get(name, name)}",
            f"{1e3 * one['seconds_per_step']:.0f}",
            f"{one['samples_per_second']:,.0f}",
            f"{one['table_bytes'] / 1e9:.2f}",
            f"{one['peak_bytes'] / 1e9:.2f}",
        ]
        for name, points in found["growth"].items()
        for value, one in points.items()
    ]
    said = (
        f"Growth from batch {found['batch']:,}, {found['ids']:,} ids and {found['fields']} fields, "
        "each by itself:"
    )
    heads = ["", "ms a step", "samples/s", "tables GB", "peak memory GB"]
    each = f"Each further id adds {found['bytes_per_id']:.0f} bytes to the peak."
    return f"{wrapped(said)}\n\n{markdown(heads, rows)}\n\n{each}"


if __name__ == "__main__":
    main()
