"""Cost of `train.reproducible`: steps of DeepFM with and without it take turns in a process.

The median of (with / without) over pairs of steps, of wall time and of processor time, which other
processes change less; on one thread and on all cores.

    python benchmarks/reproducible.py
"""

from __future__ import annotations

import statistics
import time

import launchers_allocator  # noqa: F401
import torch
from machine import CORES
from report import begin
from tqdm import tqdm
from training import Training, training

from stampede.engine.reading import Reader

# Pairs of steps of each batch size.
PAIRS = {8192: 20, 65536: 6}


def main() -> None:
    options, report = begin("reproducible", __doc__)
    pairs = {1024: 4} if options.quick else PAIRS
    found: dict[str, dict] = {}
    points = [(batch, threads) for batch in pairs for threads in sorted({1, CORES})]
    for batch, threads in tqdm(points, desc="reproducible", unit="run", ncols=100):
        found[f"batch {batch}, threads {threads}"] = measure(batch, threads, pairs[batch])
        report.add(pairs=pairs, ratios=found)
    for name, ratios in found.items():
        print(f"{name}: {ratios['clock']:.3f} by the clock, {ratios['processor']:.3f} processor")
    report.close()


def measure(batch: int, threads: int, pairs: int) -> dict[str, float]:
    """Medians of the ratios, and seconds of a step without it."""
    torch.set_num_threads(threads)
    overrides = [f"train.batch_size={batch}", f"data.rows={max(4 * batch, 100_000)}"]
    given = ["data.kind=synthetic", "data.zipf=1.3", "data.test_rows=1000", *overrides]
    with training(None, given) as without:
        train = without.config.train.model_copy(update={"reproducible": True})
        config = without.config.model_copy(update={"train": train})
        job, here = without.job, without.processes
        reader = Reader(config, without.dataset, here)
        both = without, Training(config, without.dataset, job, here, reader.training())
        for one in both * 3:
            one.step()
        seconds = [[_seconds(one) for one in both] for _ in range(pairs)]
    ratios = [[of / base for of, base in zip(*pair[::-1], strict=True)] for pair in seconds]
    clock, processor = map(statistics.median, zip(*ratios, strict=True))
    without_it = statistics.median(pair[0][0] for pair in seconds)
    return {"clock": clock, "processor": processor, "seconds_without": without_it}


def _seconds(one: Training) -> tuple[float, float]:
    """Wall seconds and processor seconds of a step."""
    start = time.perf_counter(), time.process_time()
    one.step()
    return time.perf_counter() - start[0], time.process_time() - start[1]


if __name__ == "__main__":
    main()
