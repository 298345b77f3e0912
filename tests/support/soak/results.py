"""What a soak has found, as JSON and as a table in Markdown."""

import json
import os
import sys
from pathlib import Path

from stampede.files import write_file
from support.paths import ROOT


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
