"""The command `stampede prepare`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import get_args

from stampede import stores
from stampede.data.errors import DataError
from stampede.data.exit_status import exit_status
from stampede.data.on_spark import engine_of
from stampede.data.options import PreparationOptions
from stampede.data.prepare import prepare
from stampede.data.prepared.manifest import prepared_summary
from stampede.data.prepared.verify import verify
from stampede.data.sources import Kind, open_source
from stampede.settings import from_key_values, keys_help

_EXAMPLE = """example:
  stampede prepare criteo_kaggle train.txt --out prepared \\
      --set split=random --set on_bad_row=skip"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stampede prepare",
        description="Turn a raw click log into arrays to train on.\nIds and ranges are learned "
        "from the training part only.",
        epilog="\n".join(["options, with defaults:", *keys_help(PreparationOptions), "", _EXAMPLE]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    kinds = "criteo_kaggle, criteo_1tb, avazu, or table: any log, with --schema"
    add("kind", nargs="?", metavar="KIND", help=kinds)
    add("files", nargs="*", metavar="FILE", help="csv, tsv or parquet; .gz, .zst; or a glob")
    add("--out", metavar="FOLDER", help="new folder for the prepared data")
    add("--schema", default="", metavar="FILE.yaml", help="what the columns of a table mean")
    option = "an option, see below; may be repeated"
    add("-s", "--set", action="append", default=[], metavar="KEY=VALUE", help=option)
    hour = "avazu: hour of the day and weekday as ids instead of the hour"
    add("--split-hour", action="store_true", help=hour)
    help = "let Spark's tasks read the files, such as local[2] or spark://HOST:7077"
    add("--spark", metavar="MASTER", help=help)
    add("--verify", metavar="PREPARED", help="only check the files of a prepared folder")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = _parser()
    # Intermixed: files may come before and after the options.
    given = parser.parse_intermixed_args(arguments)
    if given.verify is None:
        if given.kind is None or not given.files or given.out is None:
            parser.error("write KIND, FILE... and --out FOLDER, or --verify FOLDER")
        if given.kind not in get_args(Kind):
            parser.error(f"KIND: found {given.kind!r}; write one of {', '.join(get_args(Kind))}")

    def run() -> None:
        if given.verify is not None:
            verify(stores.fetched(given.verify))
            print(f"{given.verify}: all files are unchanged and valid")
            return
        options = from_key_values(given.set, PreparationOptions, "--set")
        source = open_source(
            given.kind,
            given.files,
            options,
            schema=given.schema,
            split_hour=given.split_hour or None,
        )
        with (
            engine_of(given.spark) as engine,
            stores.outgoing(given.out, overwrite=False) as out,
        ):
            if not prepare(source, options, out.absolute(), engine):
                raise DataError(f"{given.out}: already exists; delete it, or choose another --out")
        print(prepared_summary(out, given.out))

    return exit_status(run)
