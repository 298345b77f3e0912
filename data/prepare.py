"""Prepare a click log: `python -m stampede.data.prepare KIND FILE... --out FOLDER`."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from stampede.data.errors import DataError
from stampede.data.preparation import PreparationOptions, prepare
from stampede.data.prepared.manifest import PARTS, read_manifest
from stampede.data.prepared.verify import verify
from stampede.data.sources import Kind, open_source
from stampede.settings import SettingsError, all_keys, from_key_values


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 2 for a user's mistake."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        if given.verify is not None:
            verify(Path(given.verify))
            print(f"{given.verify}: all files are as they were written")
            return 0
        if given.kind is None or not given.files or given.out is None:
            parser.error("write KIND, FILE... and --out FOLDER, or --verify FOLDER")
        _prepare(given)
    except (DataError, SettingsError) as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; nothing half-written was left", file=sys.stderr)
        return 130
    return 0


def _prepare(given: argparse.Namespace) -> None:
    folder = Path(given.out)
    if folder.exists():
        raise DataError(f"{folder}: is there already; delete it, or write another --out")
    options = from_key_values(given.set, PreparationOptions, "--set")
    learned = None if given.learned is None else Path(given.learned)
    if learned is not None:
        read_manifest(learned)
    source = open_source(
        given.kind,
        given.files,
        options,
        schema=given.schema or "",
        split_hour=given.split_hour,
    )
    prepare(source, options, folder, learned)
    print(_summary(folder))


def _summary(folder: Path) -> str:
    manifest = read_manifest(folder)
    rows = [f"  {part:<12}{manifest.rows(part):>16,} rows" for part in PARTS]
    ids = sum(entry.rows for entry in manifest.fields)
    size = sum(
        entry.bytes
        for shards in manifest.parts.values()
        for shard in shards
        for entry in shard.files.values()
    )
    rows.append(f"  {len(manifest.fields)} id fields with {ids:,} rows of tables together")
    rows.append(f"  {len(manifest.numbers)} numbers; {size / 1e6:,.0f} MB")
    if manifest.bad_rows:
        rows.append(f"  {manifest.bad_rows:,} bad rows left out, see {folder / 'bad_rows.jsonl'}")
    return "\n".join([str(folder), *rows])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m stampede.data.prepare",
        description="Turn a raw click log into arrays that are ready to train on. Ids and ranges "
        "are learned from the training part only.",
        epilog=_keys(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "kind",
        nargs="?",
        metavar="KIND",
        choices=get_args(Kind),
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
        "--learned",
        metavar="PREPARED",
        help="use the vocabularies and ranges of a prepared folder; all rows are then test rows",
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
        "  python -m stampede.data.prepare criteo_kaggle train.txt --out prepared \\",
        "      --set split=random --set on_bad_row=skip",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
