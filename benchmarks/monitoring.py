"""Cost of monitoring a run: time by phase, waits, percentiles, the slowest rank, the logs.

Steps of the quickstart, monitored and not, take turns in the same processes of one thread. All
times are processor time, which other processes change far less than wall time; monitoring only
waits for the disk. "steps": the median of (watched / not watched - 1) over pairs of steps, with its
standard error. "calls": the calls of a step alone. "look": the work of all ranks every
`train.timing_every` steps, including lines in all logs and TensorBoard. "all": calls and a step's
share of a look, as a share of a step.

    python benchmarks/monitoring.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from report import ROOT, begin
from tqdm import tqdm
from training import Training, training

from stampede.engine.config import Config
from stampede.engine.heartbeat import PHASES
from stampede.engine.monitor import Clock, Monitor, PhaseTimes, waits_counted
from stampede.engine.run_folder import RunFolder
from support.ranks import run_ranks

QUICKSTART = ROOT / "configs/quickstart.yaml"

PAIRS = 100

# Warm-up steps.
_FIRST = 4


def main() -> None:
    options, report = begin("monitoring", __doc__)
    pairs = 4 if options.quick else PAIRS
    overrides = ["data.rows=60000", "data.test_rows=1000"] if options.quick else []
    found: dict[str, dict] = {}
    for ranks in tqdm((1, 2), desc="monitoring", unit="run", ncols=100):
        each = run_ranks(ranks, watched_and_not, QUICKSTART, overrides, pairs)
        for rank in each:
            report.others.mine(rank.pop("processor_seconds"))
        found[str(ranks)] = summarize(each[0])
        report.add(batch=each[0]["batch"], pairs=pairs, ranks=found)
    print(table(found))
    report.close()


def watched_and_not(job: Path, overrides: list[str], pairs: int) -> dict[str, Any]:
    """Train as one of several ranks.

    Returns:
        Processor seconds: of steps, `watched` and `not watched`; of `looks`; of `calls` in a step;
        of this process. And the batch size.
    """
    # Looks are requested below, as at an epoch's end; none is printed.
    overrides = [*overrides, "train.timing_every=1000000"]
    seconds: dict[str, list[float]] = {"watched": [], "not watched": [], "looks": []}
    with tempfile.TemporaryDirectory() as folder, training(None, overrides, job) as trained:
        for _ in range(_FIRST):
            trained.step()
        with RunFolder(Path(folder)) as run:
            for pair in range(pairs):
                # Alternate which one goes first.
                for watched in (True, False) if pair % 2 else (False, True):
                    if watched:
                        step, look = _watched(trained, run)
                        seconds["watched"].append(step)
                        seconds["looks"].append(look)
                    else:
                        start = time.process_time()
                        trained.step()
                        seconds["not watched"].append(time.process_time() - start)
        return {
            **seconds,
            "calls": _calls(trained, waits=_waits(trained)),
            "batch": trained.config.train.batch_size,
            "processor_seconds": time.process_time(),
        }


def _watched(trained: Training, run: RunFolder) -> tuple[float, float]:
    """Seconds of a step monitored as by `Trainer`, and of a look at all ranks."""
    step = trained.steps + 1
    with Monitor(trained.config, trained.processes, run.path, trained.steps) as monitor:
        start = time.process_time()
        trained.step()
        monitor.after_step(step)
        end = time.process_time()
        line = monitor.line(step, ended=True)
        trained.processes.on_main(lambda: run.log(line))
        return end - start, time.process_time() - end


def _waits(trained: Training) -> int:
    times = PhaseTimes(Clock(trained.processes.device))
    with trained.processes.heartbeat.listening(times.begin), waits_counted(times):
        trained.step()
    return len(times._step.waits)


def _calls(trained: Training, waits: int, steps: int = 2000) -> float:
    """Processor seconds of the monitoring calls in a step."""
    times, heartbeat = PhaseTimes(Clock(trained.processes.device)), trained.processes.heartbeat
    with heartbeat.listening(times.begin):
        start = time.process_time()
        for _ in range(steps):
            for phase in PHASES:
                heartbeat.beat(phase)
            for _ in range(waits):
                times.waited(times.mark())
            times.end_step()
        times.take()
        return (time.process_time() - start) / steps


def summarize(rank: dict[str, Any]) -> dict[str, Any]:
    """Costs of rank 0, which writes the lines of all ranks."""
    pairs = zip(rank["watched"], rank["not watched"], strict=True)
    costs = [on / off - 1 for on, off in pairs]
    step, look = statistics.median(rank["not watched"]), statistics.median(rank["looks"])
    every = Config().train.timing_every
    low, _, high = statistics.quantiles(costs, n=4)
    return {
        "seconds_per_step": step,
        "steps_cost": statistics.median(costs),
        # Standard error of a median, from the quartiles of a nearly normal distribution.
        "standard_error": 1.25 * (high - low) / 1.35 / len(costs) ** 0.5,
        "calls_seconds": rank["calls"],
        "look_seconds": look,
        "steps_of_a_look": every,
        "all_share": (rank["calls"] + look / every) / step,
    }


def table(found: dict[str, dict]) -> str:
    """The results as text."""
    lines = [f"{'ranks':>5}{'ms a step':>11}{'steps':>18}{'calls':>10}{'look':>10}{'all':>9}"]
    for ranks, one in found.items():
        steps = f"{one['steps_cost']:.2%} +- {one['standard_error']:.2%}"
        lines.append(
            f"{ranks:>5}{1e3 * one['seconds_per_step']:>11.1f}{steps:>18}"
            f"{1e6 * one['calls_seconds']:>7.0f} us{1e3 * one['look_seconds']:>7.1f} ms"
            f"{one['all_share']:>9.3%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
