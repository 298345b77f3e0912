"""Options, JSON results and Markdown, shared by all benchmarks."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import CORES, QUIET, OtherProcesses, describe_machine

from stampede.files import write_file

ROOT = Path(__file__).resolve().parents[1]
RESULTS, CACHE = ROOT / "benchmarks/results", ROOT / "cache/benchmarks"

# Some share support code with the tests.
sys.path.insert(0, str(ROOT / "tests"))


def command_line(
    *benchmarks: Callable[[argparse.Namespace, Report], str],
    parser: argparse.ArgumentParser | None = None,
) -> None:
    """Run the benchmark that the command line names, or the only one of the file.

    Args:
        benchmarks: their names are those of the results; they return Markdown.
        parser: of options beside those of all benchmarks.
    """
    doc = sys.modules[benchmarks[0].__module__].__doc__
    parser = parser or argparse.ArgumentParser(description=doc.splitlines()[0])
    known = {benchmark.__name__: benchmark for benchmark in benchmarks}
    if len(known) > 1:
        parser.add_argument("name", choices=known)
    parser.add_argument("--out", type=Path, help="results; default: benchmarks/results/NAME.json")
    parser.add_argument("--folder", type=Path, default=CACHE, help="for drawn clicks and runs")
    parser.add_argument("--quick", action="store_true", help="seconds; the figures mean little")
    options = parser.parse_args()
    name = getattr(options, "name", benchmarks[0].__name__)
    options.folder, options.out = options.folder.resolve(), options.out or RESULTS / f"{name}.json"
    for folder in (options.out.parent, options.folder):
        folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(CORES)
    report = Report(options.out, options.quick)
    shown, share = known[name](options, report), report.others.share()
    print(f"{shown}\n\nother processes took {share:.1%} of the cores; results in {options.out}")
    if share > QUIET:
        print(f"above {QUIET:.0%} timings are unreliable", file=sys.stderr)
    if report.failed:
        sys.exit(f"error: failed: {', '.join(report.failed)}")


class Report:
    """Results of a benchmark; the file is rewritten after each part.

    Attributes:
        others: the load of other processes.
        found: results so far, by name.
        failed: what failed; the exit status is then 1.
    """

    def __init__(self, out: Path, quick: bool = False) -> None:
        self._out, self._quick = out, quick
        self._machine = describe_machine()
        self.others = OtherProcesses()
        self.found: dict[str, Any] = {}
        self.failed: list[str] = []

    def add(self, **found: Any) -> None:
        """Add named results, and write the file."""
        self.found |= found
        machine = {**self._machine, "other_processes": round(self.others.share(), 4)}
        whole = {"machine": machine, "quick": self._quick, **self.found}
        write_file(self._out, json.dumps(whole, indent=1) + "\n")


def markdown(heads: list[str], rows: list[list[Any]]) -> str:
    """A table of Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def wrapped(text: str) -> str:
    """A paragraph in lines as long as the manual's."""
    return textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False)


def measured_on(machine: dict) -> str:
    """A sentence about the machine."""
    instructions = ", ".join(machine["bf16_instructions"]) or "no instructions for bf16"
    where = f"{machine['cores']} cores: {machine['cpu']}, {instructions}"
    return f"Measured at {machine['commit']} on {where}."
