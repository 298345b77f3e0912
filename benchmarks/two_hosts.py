"""The time of a step between two hosts at a rate of the network, beside what it must be.

Network namespaces of this machine are the hosts, so this needs root; each has one process with one
thread. "must be" is the step without a limit, and its traffic at the rate, as if nothing of it
overlapped with computing. TorchRec's planner (`launch.py --plan`) counts the traffic of the tables
only; gradients of dense layers are the rest of what is sent. Only on a quiet machine.

    python benchmarks/two_hosts.py --rate 1gbit
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from launched import run_program
from report import ROOT, Report, command_line, markdown

from support.two_hosts import two_hosts

PLANS = ("table_wise", "row_wise", "data_parallel")
# Timing lines of a run, each of so many steps; the first one warms up.
_LINES, _STEPS = 4, 20

# Of a line of the planner's statistics: MB a rank that come as ids, and leave as rows.
_TRAFFIC = re.compile(r"^0 .*\)\s+([\d.]+)\s+([\d.]+)\s+\w+: \d+", re.MULTILINE)

_UNITS = {"mbit": 1e6, "gbit": 1e9}


def two_hosts_steps(options: argparse.Namespace, report: Report) -> str:
    """Milliseconds of a step by plan, without a limit and at the rate."""
    found: dict[str, dict] = {}
    for plan in PLANS[:1] if options.quick else PLANS:
        given = [f"sharding.plan={plan}", f"train.batch_size={options.batch_size}"]
        free, limited = (steps(given, rate, options) for rate in (None, options.rate))
        network = limited["sent_bytes"] / bytes_per_second(options.rate)
        found[plan] = {
            "free": free,
            "limited": limited,
            "planned_bytes": planned_bytes(given, options.folder),
            "must_be": free["step_seconds"] + network,
        }
        report.add(rate=options.rate, batch_size=options.batch_size, plans=found)
    heads = ["plan", "ms without a limit", f"ms at {options.rate}", "must be", "MB a step, planned"]
    heads.append("MB a step, sent")
    rows = [
        [
            plan,
            f"{1e3 * one['free']['step_seconds']:.0f}",
            f"{1e3 * one['limited']['step_seconds']:.0f}",
            f"{1e3 * one['must_be']:.0f}",
            f"{one['planned_bytes'] / 1e6:.1f}",
            f"{one['limited']['sent_bytes'] / 1e6:.1f}",
        ]
        for plan, one in found.items()
    ]
    return markdown([*heads], rows)


def bytes_per_second(rate: str) -> float:
    """Of a rate as `tc` takes it, such as `1gbit`."""
    number, unit = re.fullmatch(r"([\d.]+)([a-z]+)", rate).groups()
    return float(number) * _UNITS[unit] / 8


def steps(given: list[str], rate: str | None, options: argparse.Namespace) -> dict[str, Any]:
    """Mean seconds and sent bytes of a step; of the first host, after the first timing line."""
    rows = _LINES * _STEPS * options.batch_size
    arguments = [
        ROOT / "configs/quickstart.yaml", "run.name=two", f"data.rows={rows}",
        "data.validation_fraction=0", "evaluate.select_on=test", "evaluate.every=0",
        "data.test_rows=10000", f"train.timing_every={_STEPS}", "checkpoint.every_steps=0", *given,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(dir=options.folder) as made, two_hosts(Path(made)) as hosts:
        folder = Path(made)
        if rate:
            for host in hosts:
                host.limit(rate)
        program = ROOT / "launch.py"
        more = [*arguments, f"run.dir={folder}"]
        done = hosts.end([hosts.torchrun(host, program, more) for host in hosts])
        if any(one.returncode for one in done):
            sys.exit("\n".join(one.stderr[-2000:] for one in done))
        sent = hosts.north.sent_bytes()
        lines = map(json.loads, (folder / "two/metrics.jsonl").read_text().splitlines())
        timing = [line for line in lines if line["kind"] == "timing"][1:]
    mean = sum(line["step_seconds"]["mean"] for line in timing) / len(timing)
    waited = sum(line["communication_seconds"] for line in timing) / len(timing)
    # The evaluation's traffic and the checkpoint's are little beside that of the steps.
    return {
        "step_seconds": mean,
        "communication_seconds": waited,
        "sent_bytes": sent / (_LINES * _STEPS),
    }


def planned_bytes(given: list[str], folder: Path) -> float:
    """Bytes that a rank sends to the other host in a step, as TorchRec's planner counts.

    Ids go out once, rows once and their gradients once, half of them to the rank itself.
    """
    file = folder / "plan.json"
    cluster = ["--world-size", "2", "--devices-per-node", "1", "--compute-device", "cpu"]
    cluster += ["--device-memory", "64GB", "--plan-out", str(file)]
    run_program([ROOT / "launch.py", "--plan", *cluster, ROOT / "configs/quickstart.yaml", *given])
    statistics = "\n".join(json.loads(file.read_text())["torchrec"])
    ids, rows = map(float, _TRAFFIC.search(statistics).groups())
    return (ids + 2 * rows) * 1e6 / 2


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="1gbit", help="of the network, as tc takes it")
    parser.add_argument("--batch-size", type=int, default=8192)
    command_line(two_hosts_steps, parser=parser)
