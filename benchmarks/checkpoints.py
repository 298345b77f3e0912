"""Cost of checkpoints for training, with one at the start of every second half minute.

launch.py's steps in one process, in windows of about half a minute with equal numbers of steps.
Every second window begins with a checkpoint and ends when it is written; the ratio of a pair of
windows is the cost of a checkpoint every 30 s. Configurations: the quickstart with its 0.35 million
ids, and clicks with 1.3 and 2.6 million ids. Each has its own process, so that a window's peak
memory is from training alone.

    python benchmarks/checkpoints.py
"""

from __future__ import annotations

import multiprocessing
import shutil
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch
from clicks import write_clicks
from machine import CORES, memory_of_this_process
from report import ROOT, begin
from timing import Stopwatch, seconds_of
from training import DEEPFM, Training, training

from stampede.engine.checkpoint.manifest import Progress
from stampede.engine.checkpoint.saving import Checkpoints

# Seconds between two checkpoints, and their largest share of the training time.
WINDOW, BAR = 30.0, 0.03

PAIRS = 5
BATCH, ROWS = 8192, 1 << 20
IDS = (1_300_000, 2_600_000)

# Steps before the first window, to touch memory and warm caches.
_WARM_UP = 20


class Window(NamedTuple):
    """Some steps in a row, with or without a checkpoint.

    Attributes:
        seconds: in total.
        flush: seconds to bring rows up to date.
        stall: seconds that training stood still for the checkpoint, with the flush.
        background: seconds from then until it was written.
        peak: largest resident set, in bytes.
    """

    seconds: float
    flush: float
    stall: float
    background: float
    peak: int


def main() -> None:
    options, report = begin("checkpoints", __doc__)
    window, pairs = (2.0, 2) if options.quick else (WINDOW, PAIRS)
    found = {}
    for name, file, overrides in _jobs(options.folder, options.quick):
        arguments = (file, overrides, options.folder / "checkpoints", window, pairs)
        # A new process, not a fork: torch's threads would be lost.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found[name] = pool.apply(measure, arguments)
        report.add(window_seconds=window, bar=BAR, checkpoints=found)
        print(line(name, found[name]), flush=True)
    report.close()


def _jobs(folder: Path, quick: bool) -> list[tuple[str, Path, list[str]]]:
    """Name, configuration and overrides of each."""
    scale = 20 if quick else 1
    rows = ROWS // scale
    quickstart = [f"data.rows={rows}"] if quick else []
    jobs = [("quickstart", ROOT / "configs/quickstart.yaml", quickstart)]
    for ids in IDS:
        clicks = write_clicks(folder, rows, ids // scale)
        overrides = [f"data.path={clicks}", f"train.batch_size={BATCH}"]
        jobs.append((f"{ids // scale:,} ids", DEEPFM, overrides))
    return jobs


def measure(file: Path, overrides: list[str], folder: Path, window: float, pairs: int) -> dict:
    """Seconds of pairs of windows, and costs of a checkpoint.

    Args:
        file: configuration.
        overrides: of it.
        folder: for checkpoints; deleted afterwards.
        window: seconds of a window without a checkpoint.
        pairs: of windows, besides a first one that does not count.
    """
    torch.set_num_threads(CORES)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        with training(None, overrides, file) as job:
            job.seconds(_WARM_UP)
            steps = max(round(window * _WARM_UP / job.seconds(_WARM_UP)), 2)
            arguments = job.config, job.dataset, job.processes
            with Checkpoints(folder, job.job, *arguments) as checkpoints:
                taken = [
                    (_window(job, steps, None), _window(job, steps, checkpoints))
                    for _ in range(pairs + 1)
                ][1:]
            ids = sum(job.dataset.vocabulary_sizes.values())
        (newest, *_) = sorted(folder.iterdir(), reverse=True)
        size = sum(path.stat().st_size for path in newest.iterdir())
    finally:
        shutil.rmtree(folder)
    return summarize(taken, steps, ids, size)


def _window(job: Training, steps: int, checkpoints: Checkpoints | None) -> Window:
    """Run `steps` steps; begin a checkpoint before them and wait for it after them, if given."""
    # Reset the peak resident size (proc(5)).
    Path("/proc/self/clear_refs").write_text("5")
    watch, flush, stall = Stopwatch(), 0.0, 0.0
    with watch.watching(Checkpoints, "_try_to_write", "background"):
        start = time.perf_counter()
        if checkpoints is not None:
            # As the training loop does for a checkpoint within an epoch.
            flush = seconds_of(job.flush)
            stall = flush + seconds_of(lambda: _save(job, checkpoints))
        for _ in range(steps):
            job.step()
        if checkpoints is not None:
            checkpoints.wait()
        seconds = time.perf_counter() - start
    background = watch.seconds.get("background", 0.0)
    return Window(seconds, flush, stall, background, memory_of_this_process()[1])


def _save(job: Training, checkpoints: Checkpoints) -> None:
    samples = job.steps * job.config.train.batch_size
    checkpoints.save(Progress(step=job.steps, samples=samples, reader={"epoch": 0, "samples": 1}))


def summarize(taken: list[tuple[Window, Window]], steps: int, ids: int, size: int) -> dict:
    """Medians over pairs of windows: one without a checkpoint, one with it."""
    without, with_one = zip(*taken, strict=True)
    return {
        "ids": ids,
        "checkpoint_bytes": size,
        "steps_a_window": steps,
        "share_taken": statistics.median(b.seconds / a.seconds for a, b in taken) - 1,
        "flush_seconds": statistics.median(window.flush for window in with_one),
        "stall_seconds": statistics.median(window.stall for window in with_one),
        "background_seconds": statistics.median(window.background for window in with_one),
        "peak_bytes_without": max(window.peak for window in without),
        "peak_bytes_with": max(window.peak for window in with_one),
        "all_seconds_without": [window.seconds for window in without],
        "all_seconds_with": [window.seconds for window in with_one],
        "all_stall_seconds": [window.stall for window in with_one],
        "all_background_seconds": [window.background for window in with_one],
    }


def line(name: str, found: dict) -> str:
    """A readable line of the results."""
    more = found["peak_bytes_with"] - found["peak_bytes_without"]
    stall = f"{found['stall_seconds']:.2f} s (flush {found['flush_seconds']:.2f} s)"
    return (
        f"{name:<14} {found['share_taken']:>7.2%} of training (bar {BAR:.0%}), stall {stall}, "
        f"background {found['background_seconds']:.2f} s, peak "
        f"{found['peak_bytes_without'] / 1e9:.2f} + {more / 1e9:.2f} GB, "
        f"{found['checkpoint_bytes'] / 1e6:,.0f} MB a checkpoint"
    )


if __name__ == "__main__":
    main()
