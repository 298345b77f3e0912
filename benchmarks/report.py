"""Options and JSON results, shared by all benchmarks of `make bench`."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch
from machine import CORES, QUIET, OtherProcesses, describe_machine

from stampede.files import write_file

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"

# Some share support code with the tests.
sys.path.insert(0, str(ROOT / "tests"))


def begin(name: str, parser: argparse.ArgumentParser | str) -> tuple[argparse.Namespace, Report]:
    """Parse the common options and a benchmark's own.

    Args:
        name: of the results.
        parser: of its own options; a docstring if it has none.
    """
    if isinstance(parser, str):
        parser = argparse.ArgumentParser(description=parser.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="results")
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "cache/benchmarks",
        help="folder for drawn clicks, which are kept, and unfinished runs",
    )
    parser.add_argument(
        "--quick", action="store_true", help="takes seconds; the figures mean little"
    )
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(CORES)
    return options, Report(options.out, options.quick)


class Report:
    """Results of a benchmark; the file is rewritten after each part.

    Args:
        out: JSON file.
        quick: whether sizes were cut.

    Attributes:
        quick: as given.
        others: the load of other processes.
        found: results so far, by name.
    """

    def __init__(self, out: Path, quick: bool = False) -> None:
        self._out = out
        self.quick = quick
        self._machine = describe_machine()
        self.others = OtherProcesses()
        self.found: dict[str, Any] = {}

    def add(self, **found: Any) -> None:
        """Add named results, and write the file."""
        self.found.update(found)
        report = {
            "machine": {**self._machine, "other_processes": round(self.others.share(), 4)},
            "quick": self.quick,
            **self.found,
        }
        write_file(self._out, json.dumps(report, indent=1) + "\n")

    def close(self) -> None:
        """Print the load of other processes."""
        share = self.others.share()
        print(f"\nother processes took {share:.1%} of the cores' time; results in {self._out}")
        if share > QUIET:
            print(f"above {QUIET:.0%} timings are unreliable", file=sys.stderr)


def picture_path(out: Path) -> Path:
    """The picture beside a JSON file."""
    return out.with_suffix(".png")


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def wrapped(text: str) -> str:
    """A paragraph in lines as long as the manual's."""
    return textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False)


def measured_on(machine: dict) -> str:
    """A sentence about the machine."""
    instructions = ", ".join(machine["bf16_instructions"]) or "no instructions for bf16"
    return (
        f"Measured at {machine['commit']} on {machine['cores']} cores: {machine['cpu']}, "
        f"{instructions}."
    )
