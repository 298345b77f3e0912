"""Share of a training step that gloo processes on one machine spend in communication.

Two figures, for ranks with one thread each. "waiting": the time a rank is blocked in a collective,
from timers around `Work.wait`, which all calls of torch.distributed go through; it includes waiting
for ranks that compute longer and, if there are more ranks than cores, for a core. "exchange": the
time of the same collectives on buffers of the same sizes without other work. Both are shares of the
time of the steps with the last flush; means over the ranks.

    python benchmarks/communication.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from clicks import IDS, write_clicks
from exchanges import train_and_wait
from report import Report, parse_options
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.ranks import run_ranks

ROWS = 1 << 18
RANKS = (2, 4)
# Whole epochs.
STEPS = {8192: 32, 65536: 4}
PLANS = ("table_wise", "row_wise")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options = parse_options(parser, "communication")
    rows, ids = (16_384, 200_000) if options.quick else (ROWS, IDS)
    ranks = RANKS[:1] if options.quick else RANKS
    steps = {4096: 2} if options.quick else STEPS
    plans = PLANS[:1] if options.quick else PLANS
    clicks = write_clicks(options.folder, rows, ids)
    report = Report(options.out, options.quick)
    found: dict[str, dict] = {}
    points = [(n, plan, batch) for n in ranks for batch in steps for plan in plans]
    # The plan matters less where the dense layers take most of the step.
    points = [point for point in points if point[1:] != ("row_wise", max(STEPS))]
    for world_size, plan, batch in tqdm(points, desc="communication", unit="run", ncols=100):
        overrides = [f"train.batch_size={batch}", f"sharding.plan={plan}"]
        overrides.append(f"evaluate.batch_size={batch}")
        each = run_ranks(world_size, train_and_wait, clicks, overrides, steps[batch])
        for rank in each:
            report.others.mine(rank.pop("processor_seconds"))
        found[f"{world_size} {plan} {batch}"] = summarize(each, steps[batch])
        report.add(rows=rows, ids=ids, communication=found)
    print(table(found))
    report.close()


def summarize(ranks: list[dict], steps: int) -> dict:
    """Means over the ranks."""
    seconds = statistics.mean(rank["seconds"] for rank in ranks)
    return {
        "steps": steps,
        "seconds_per_step": seconds / steps,
        "waiting_share": statistics.mean(rank["waited"] / rank["seconds"] for rank in ranks),
        "exchange_share": statistics.mean(rank["alone"] / rank["seconds"] for rank in ranks),
        "waits_per_step": ranks[0]["waits"] / steps,
        "sent_bytes_per_step": {
            name: round(statistics.mean(rank["sent_bytes"].get(name, 0) for rank in ranks))
            for name in sorted({name for rank in ranks for name in rank["sent_bytes"]})
        },
    }


def table(found: dict[str, dict]) -> str:
    """The results as text."""
    lines = [
        f"{'ranks':>5}  {'plan':<12}{'batch':>7}{'ms a step':>11}{'waiting':>9}{'exchange':>10}"
        f"{'collectives':>13}{'MB a step':>11}"
    ]
    for name, one in found.items():
        world_size, plan, batch = name.split()
        sent = sum(one["sent_bytes_per_step"].values()) / 1e6
        lines.append(
            f"{world_size:>5}  {plan:<12}{int(batch):>7,}{1e3 * one['seconds_per_step']:>11.1f}"
            f"{one['waiting_share']:>9.1%}{one['exchange_share']:>10.1%}"
            f"{one['waits_per_step']:>13.0f}{sent:>11.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
