"""Prepare a click log: `python -m stampede.data.prepare KIND FILE... --out FOLDER`."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from stampede.data.command import exit_status
from stampede.data.errors import DataError
from stampede.data.preparation import PreparationOptions, prepare
from stampede.data.prepared.summary import prepared_summary
from stampede.data.prepared.verify import verify
from stampede.data.sources import Kind, open_source
from stampede.settings import all_keys, from_key_values


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 2 for a user's mistake."""
    parser = _parser()
    # Files may stand on either side of the options.
    given = parser.parse_intermixed_args(arguments)
    if given.verify is not None:
        return exit_status(lambda: _verify(Path(given.verify)))
    if given.kind is None or not given.files or given.out is None:
        parser.error("write KIND, FILE... and --out FOLDER, or --verify FOLDER")
    if given.kind not in get_args(Kind):
        parser.error(f"KIND: found {given.kind!r}; write one of {', '.join(get_args(Kind))}")
    return exit_status(lambda: _prepare(given))


def _verify(folder: Path) -> None:
    verify(folder)
    print(f"{folder}: all files are as they were written, and hold what they should")


def _prepare(given: argparse.Namespace) -> None:
    options = from_key_values(given.set, PreparationOptions, "--set")
    source = open_source(
        given.kind,
        given.files,
        options,
        schema=given.schema or "",
        split_hour=given.split_hour or None,
        features=options.features,
    )
    folder = Path(given.out)
    if not prepare(source, options, folder):
        raise DataError(f"{folder}: is there already; delete it, or write another --out")
    print(prepared_summary(folder))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stampede prepare",
        description="Turn a raw click log into arrays that are ready to train on.\nIds and ranges "
        "are learned from the training part only.",
        epilog=_keys(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "kind",
        nargs="?",
        metavar="KIND",
        help="criteo_kaggle, criteo_1tb, avazu, or table: any log, with --schema",
    )
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="csv, tsv or parquet; .gz, .zst; or a glob"
    )
    parser.add_argument("--out", metavar="FOLDER", help="new folder for the prepared data")
    parser.add_argument("--schema", metavar="FILE.yaml", help="what the columns of a table mean")
    parser.add_argument(
        "-s",
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option, see below; may be repeated",
    )
    parser.add_argument(
        "--split-hour",
        action="store_true",
        help="avazu: hour of the day and weekday instead of the hour as an id",
    )
    parser.add_argument(
        "--verify", metavar="PREPARED", help="check the files of a prepared folder; nothing else"
    )
    return parser


def _keys() -> str:
    lines = ["options, with defaults:"]
    for key in all_keys(PreparationOptions):
        lines.append(f"  {key.path} = {key.default!r}")
        indent = " " * 6
        lines += textwrap.wrap(key.description, 92, initial_indent=indent, subsequent_indent=indent)
    lines += [
        "",
        "example:",
        "  stampede prepare criteo_kaggle train.txt --out prepared \\",
        "      --set split=random --set on_bad_row=skip",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
