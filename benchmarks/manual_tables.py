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

# The benchmarks of each page; `tables` of each module shows its results.
PAGES = {
    "docs/speed.md": (
        "end_to_end",
        "update_kernel",
        "waiting_rows",
        "step_breakdown",
        "growth",
        "communication",
        "bf16_auc",
    ),
    "docs/choices.md": ("quality",),
    "docs/incremental.md": ("incremental", "many_periods"),
    "docs/torchrec.md": ("torchrec_features",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace the tables in the manual")
    options = parser.parse_args()
    for name in PAGES:
        text = page_tables(name, RESULTS)
        if options.write:
            path = ROOT / name
            before, rest = path.read_text(encoding="utf-8").split(BEGIN)
            write_file(path, f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")
        else:
            print(text)


def page_tables(page: str, results: Path) -> str:
    """The tables of a page, from the results that are there and not of `--quick`."""
    parts = []
    for name in PAGES[page]:
        path = results / f"{name}.json"
        found = json.loads(path.read_text()) if path.exists() else {"quick": True}
        if not found["quick"]:
            tables = importlib.import_module(name).tables
            parts += [tables(found), measured_on(found["machine"])]
    return "\n\n".join(parts) or "Not measured yet."


if __name__ == "__main__":
    main()
