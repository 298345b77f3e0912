"""What a run has come to: lines, weights and moments, position; and what a soak has found."""

import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from stampede.engine.checkpoint.manifest import read_manifest
from stampede.engine.checkpoint.retention import newest, readable, verify
from support.jobs import untimed, without_times
from support.paths import ROOT
from support.warm_starts import tensors_of

_CONTINUED = re.compile(r"continuing after step ([\d,]+) from")


def continued_after(said):
    """Steps that runs went on after, in the order they said so."""
    return [int(step.replace(",", "")) for step in _CONTINUED.findall(said)]


def newest_step(run):
    """Steps in the newest checkpoint that has its name; None without one."""
    return next((progress.step for _, progress in readable(run / "checkpoints")), None)


def all_whole(run):
    """Check every checkpoint that has its name."""
    for path, _ in readable(run / "checkpoints"):
        verify(path)


def same_end(run, undisturbed):
    """Check that two runs have come to the same, bit for bit and line for line.

    What each rank has drawn last is compared if they are as many.
    """
    assert without_times(run) == without_times(undisturbed)
    one, other = (untimed(json.loads((f / "summary.json").read_text())) for f in (run, undisturbed))
    assert {**one, "world_size": None} == {**other, "world_size": None}
    random = one["world_size"] == other["world_size"]
    ends = [newest(folder / "checkpoints") for folder in (run, undisturbed)]
    one, other = (tensors_of(end, random) for end in ends)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
    one, other = (untimed(asdict(read_manifest(end).progress)) for end in ends)
    assert one == other


def write_results(name, what, found):
    """Write `NAME.json` and `NAME.md` into `STAMPEDE_SOAK_RESULTS`, by default `cache/soak`.

    Args:
        what: heading of the first column.
        found: by name of a row, its values by heading.
    """
    # The benchmarks are scripts, which find each other in their own folder.
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from machine import describe_machine

    folder = Path(os.environ.get("STAMPEDE_SOAK_RESULTS", ROOT / "cache/soak"))
    folder.mkdir(parents=True, exist_ok=True)
    report = {"machine": describe_machine(), what: found}
    (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    headings = list(next(iter(found.values())))
    together = []
    for heading in headings:
        combine = max if "most" in heading or "longest" in heading else sum
        together.append(combine(row[heading] for row in found.values()))
    rows = [[row, *values.values()] for row, values in found.items()]
    table = [[what, *headings], ["---"] * (len(headings) + 1), *rows, ["together", *together]]
    lines = [f"| {' | '.join(map(str, line))} |\n" for line in table]
    (folder / f"{name}.md").write_text("".join(lines))
