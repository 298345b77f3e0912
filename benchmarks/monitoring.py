"""What it costs to watch a run: time by phase, waits, percentiles, the slowest rank, the logs.

Blocks of steps of the quickstart take turns, watched and not, in the same processes: the cost is
the median of (watched / not watched - 1) over pairs of blocks. A block ends with a look at all
ranks and its lines in all logs, which a run has every 500 steps only. "alone" is what is called in
a step without anything between, in microseconds, and as a share of a step.

    python benchmarks/monitoring.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import CORES
from report import ROOT, Report, parse_options
from timing import interleaved, seconds_of
from tqdm import tqdm
from training import Training, training

from stampede.engine.monitoring.clocks import clock_of
from stampede.engine.monitoring.monitor import Monitor
from stampede.engine.monitoring.phases import PHASES, PhaseTimes
from stampede.engine.monitoring.waits import waits_counted
from stampede.engine.run_folder import RunFolder

sys.path.insert(0, str(ROOT / "tests"))
from support.ranks import run_ranks

QUICKSTART = ROOT / "configs/quickstart.yaml"

# Steps of a block, and pairs of blocks.
STEPS, PAIRS = 10, 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options = parse_options(parser, "monitoring")
    steps, pairs = (2, 3) if options.quick else (STEPS, PAIRS)
    overrides = ["data.rows=60000", "data.test_rows=1000"] if options.quick else []
    report = Report(options.out, options.quick)
    found: dict[str, dict] = {}
    for ranks in tqdm((1, 2), desc="monitoring", unit="run", ncols=100):
        threads = max(1, CORES // ranks)
        each = run_ranks(ranks, watched_and_not, QUICKSTART, overrides, steps, pairs, threads)
        for rank in each:
            report.others.mine(rank.pop("processor_seconds"))
        found[str(ranks)] = summarize(each[0], steps)
        report.add(batch=each[0]["batch"], steps_of_a_block=steps, ranks=found)
    print(table(found))
    report.close()


def watched_and_not(
    job: Path, overrides: list[str], steps: int, pairs: int, threads: int
) -> dict[str, Any]:
    """Train as one of several ranks.

    Returns:
        Seconds of blocks, `watched` and `not watched`; `alone`: seconds a step of what watching
        calls; the batch size, and the processor time of this process.
    """
    torch.set_num_threads(threads)
    # Longer than a block, whose end is taken for that of an epoch.
    overrides = [*overrides, f"train.timing_every={steps + 1}"]
    with tempfile.TemporaryDirectory() as folder, training(None, overrides, job) as trained:
        seconds = interleaved(
            {
                "watched": lambda: _watched(trained, Path(folder), steps),
                "not watched": lambda: seconds_of(lambda: _take(trained, steps)),
            },
            pairs,
        )
        return {
            **seconds,
            "alone": _alone(trained, waits=_waits(trained)),
            "batch": trained.config.train.batch_size,
            "processor_seconds": time.process_time(),
        }


def _take(trained: Training, steps: int) -> None:
    for _ in range(steps):
        trained.step()


def _watched(trained: Training, folder: Path, steps: int) -> float:
    """Seconds of steps that are watched as `Trainer` does it."""
    run = RunFolder(folder)
    with run, Monitor(trained.config, trained.processes, folder, trained.steps) as monitor:
        start = time.perf_counter()
        for step in range(1, steps + 1):
            trained.step()
            monitor.after_step(step)
            line = monitor.line(step, ended=step == steps)
            if line is not None:
                trained.processes.on_main(lambda line=line: run.log(line))
        return time.perf_counter() - start


def _waits(trained: Training) -> int:
    """Waits in a step."""
    times = PhaseTimes(clock_of(trained.processes.device))
    with trained.processes.pulse.listening(times.begin), waits_counted(times):
        trained.step()
    return len(times._step.waits)


def _alone(trained: Training, waits: int, steps: int = 2000) -> float:
    """Seconds a step of what watching calls in it."""
    times, pulse = PhaseTimes(clock_of(trained.processes.device)), trained.processes.pulse

    def step() -> None:
        for phase in PHASES:
            pulse.beat(phase)
        for _ in range(waits):
            times.waited(times.mark())
        times.end_step()

    with pulse.listening(times.begin):
        taken = seconds_of(lambda: ([step() for _ in range(steps)], times.take()))
    return taken / steps


def summarize(rank: dict[str, Any], steps: int) -> dict[str, Any]:
    """Of rank 0, whose blocks end with those of the others."""
    pairs = list(zip(rank["watched"], rank["not watched"], strict=True))
    costs = sorted(on / off - 1 for on, off in pairs)
    step = statistics.median(rank["not watched"]) / steps
    low, _, high = statistics.quantiles(costs, n=4)
    return {
        "seconds_per_step": step,
        "cost": statistics.median(costs),
        "cost_quartiles": [low, high],
        "alone_microseconds_per_step": 1e6 * rank["alone"],
        "alone_share": rank["alone"] / step,
        "pairs": [[round(seconds, 5) for seconds in pair] for pair in pairs],
    }


def table(found: dict[str, dict]) -> str:
    """For people."""
    lines = [f"{'ranks':>5}{'ms a step':>11}{'cost':>9}{'quartiles':>20}{'alone':>20}"]
    for ranks, one in found.items():
        low, high = one["cost_quartiles"]
        alone = f"{one['alone_microseconds_per_step']:.0f} us, {one['alone_share']:.3%}"
        lines.append(
            f"{ranks:>5}{1e3 * one['seconds_per_step']:>11.1f}{one['cost']:>9.2%}"
            f"{f'{low:.2%} to {high:.2%}':>20}{alone:>20}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
