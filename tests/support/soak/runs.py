"""What a run has come to: lines, weights and moments, position; and what a soak has found."""

import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from stampede.engine.checkpoint import newest, read_manifest, read_tensors, verify
from stampede.engine.checkpoint.manifest import DTYPES
from stampede.engine.checkpoint.retention import readable
from stampede.files import write_file
from support.jobs import untimed, without_times
from support.paths import ROOT

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
    """Check that two runs have come to the same, bit for bit and line for line."""
    assert without_times(run) == without_times(undisturbed)
    summaries = [{**_summary(folder), "world_size": None} for folder in (run, undisturbed)]
    assert summaries[0] == summaries[1]
    same_ranks = _summary(run)["world_size"] == _summary(undisturbed)["world_size"]
    read = _everything if same_ranks else weights_and_moments
    states = [read(newest(folder / "checkpoints")) for folder in (run, undisturbed)]
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
    progress = [_position(newest(folder / "checkpoints")) for folder in (run, undisturbed)]
    assert progress[0] == progress[1]


def weights_and_moments(checkpoint):
    """All tensors of a checkpoint by name, but what each rank has drawn last."""
    found = _everything(checkpoint)
    return {name: tensor for name, tensor in found.items() if not name.startswith("random.")}


def _everything(checkpoint):
    """Weights, moments, random state: all tensors of a checkpoint by name."""
    tensors = read_manifest(checkpoint).tensors
    state = {
        name: torch.zeros(entry.size, dtype=DTYPES[entry.dtype]) for name, entry in tensors.items()
    }
    read_tensors(checkpoint, state, alone=True)
    return state


def _position(checkpoint):
    return untimed(asdict(read_manifest(checkpoint).progress))


def _summary(run):
    return untimed(json.loads((run / "summary.json").read_text()))


def write_results(name, what, found):
    """Write `NAME.json` and `NAME.md` into `STAMPEDE_SOAK_RESULTS`, by default `cache/soak`.

    Args:
        what: heading of the first column.
        found: by name of a row, its values by heading.
    """
    folder = Path(os.environ.get("STAMPEDE_SOAK_RESULTS", ROOT / "cache/soak"))
    folder.mkdir(parents=True, exist_ok=True)
    report = {"machine": _machine(), what: found}
    write_file(folder / f"{name}.json", json.dumps(report, indent=1) + "\n")
    write_file(folder / f"{name}.md", markdown(what, found))


def markdown(what, found):
    """A table, with a last row of sums and largest values."""
    headings = list(next(iter(found.values())))
    rows = [[name, *values.values()] for name, values in found.items()]
    rows.append(["together", *(_together(heading, found) for heading in headings)])
    lines = [[what, *headings], ["---"] * (len(headings) + 1), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _together(heading, found):
    values = [row[heading] for row in found.values()]
    return max(values) if "most" in heading or "longest" in heading else sum(values)


def _machine():
    # The benchmarks are scripts, which find each other in their own folder.
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from machine import describe_machine

    return describe_machine()
