"""Apply what was learned: `python -m stampede.data.apply PREPARED FILE... --out FOLDER`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from stampede.data.application import apply_learned
from stampede.data.command import exit_status
from stampede.data.errors import DataError
from stampede.data.prepared.summary import prepared_summary
from stampede.data.writing import WritingOptions
from stampede.settings import all_keys, from_key_values


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 2 for a user's mistake."""
    given = _parser().parse_intermixed_args(arguments)
    return exit_status(lambda: _apply(given))


def _apply(given: argparse.Namespace) -> None:
    folder = Path(given.out)
    options = from_key_values(given.set, WritingOptions, "--set")
    if not apply_learned(Path(given.prepared), given.files, options, folder):
        raise DataError(f"{folder}: is there already; delete it, or write another --out")
    print(prepared_summary(folder))


def _parser() -> argparse.ArgumentParser:
    keys = "\n".join(
        f"  {key.path} = {key.default!r}\n      {key.description}"
        for key in all_keys(WritingOptions)
    )
    parser = argparse.ArgumentParser(
        prog="stampede apply",
        description="Turn new files into arrays with the ids and ranges of a prepared folder.\n"
        "Their rows are the test part of the result.",
        epilog=f"options, with defaults:\n{keys}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("prepared", metavar="PREPARED", help="a folder made by stampede.data.prepare")
    add("files", nargs="+", metavar="FILE", help="with the same columns; .gz, .zst; or a glob")
    add("--out", required=True, metavar="FOLDER", help="new folder for the result")
    add("-s", "--set", action="append", default=[], metavar="KEY=VALUE", help="see below")
    return parser


if __name__ == "__main__":
    sys.exit(main())
