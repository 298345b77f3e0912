"""Makes the manual's tables from results, for the pages of `PAGES`.

python benchmarks/manual_tables.py            # prints them
python benchmarks/manual_tables.py --write    # replaces those in the manual
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

from report import RESULTS, ROOT, measured_on

from stampede.files import write_file

# The tables are between these lines.
BEGIN, END = "<!-- benchmarks/manual_tables.py -->", "<!-- end -->"

# The results on each page, and the module and function that show them.
PAGES = {
    "docs/speed.md": {
        "end_to_end": "end_to_end.tables",
        "update_kernel": "update_kernel.tables",
        "step_breakdown": "steps.step_breakdown_tables",
        "growth": "steps.growth_tables",
        "communication": "communication.tables",
    },
    "docs/choices.md": {"quality": "quality.tables"},
    "docs/incremental.md": {"incremental": "incremental.tables"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace the tables in the manual")
    options = parser.parse_args()
    for name in PAGES:
        text, path = page_tables(name, RESULTS), ROOT / name
        if options.write:
            before, rest = path.read_text(encoding="utf-8").split(BEGIN)
            write_file(path, f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")
        else:
            print(text)


def page_tables(page: str, results: Path) -> str:
    """The tables of a page, from the results that are there and not of `--quick`."""
    parts = []
    for name, shown_by in PAGES[page].items():
        path, (module, function) = results / f"{name}.json", shown_by.split(".")
        found = json.loads(path.read_text()) if path.exists() else {"quick": True}
        if not found["quick"]:
            tables = getattr(importlib.import_module(module), function)
            parts += [tables(found), measured_on(found["machine"])]
    return "\n\n".join(parts) or "Not measured yet."


if __name__ == "__main__":
    main()
