"""The command `stampede describe`: shows what is in a click log or a prepared folder."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import yaml

from stampede.data.description.guess import chosen_features, guess
from stampede.data.description.rows import prepared_rows, raw_rows
from stampede.data.description.statistics import collect
from stampede.data.description.text import WIDTH, described
from stampede.data.errors import DataError, OnBadRow, exit_status
from stampede.data.options import Split
from stampede.data.prepared.manifest import BAD_ROWS, MANIFEST
from stampede.data.raw.files import expand
from stampede.data.raw.rows import BadRows
from stampede.data.schema.schema import Schema
from stampede.data.sources import Kind, Source, open_source
from stampede.settings import SettingsError, all_keys, from_key_values, yaml_value

TEXT, PICTURE, SCHEMA = "description.txt", "description.png", "schema.yaml"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parsed = _parser().parse_args(arguments)
    return exit_status(lambda: _describe(parsed))


def _describe(options: argparse.Namespace) -> None:
    out = Path(options.out or f"{_stem(options.path[0])}-description")
    try:
        # All files are copied at the end, or none.
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as spool:
            made = Path(folder)
            text = _described(options, out, made, Path(spool))
            written = sorted(file.name for file in made.iterdir())
            shutil.copytree(made, out, copy_function=shutil.copyfile, dirs_exist_ok=True)
            if BAD_ROWS not in written:
                (out / BAD_ROWS).unlink(missing_ok=True)
    except OSError as failure:
        raise DataError(
            f"{failure.filename or out}: {failure.strerror or failure}; choose another folder "
            "with --out (temporary files are in TMPDIR)"
        ) from None
    print(text)
    print(f"wrote to {out}: {', '.join(written)}")


def _described(options: argparse.Namespace, out: Path, made: Path, spool: Path) -> str:
    """Write all files of `out` to `made`; returns the text."""
    path, more = Path(options.path[0]), len(options.path) - 1
    notes, chosen = [], ""
    if (path / MANIFEST).exists():
        if more or options.kind or options.schema or options.set:
            raise SettingsError(
                f"{path} is a prepared folder; give it without --kind, --schema and --set"
            )
        rows = prepared_rows(path, options.rows, spool)
    else:
        source, left_open, notes = _source(options, out, made)
        remedy = "--on-bad-row skip to leave such rows out"
        bad_rows = BadRows(options.on_bad_row, made / BAD_ROWS, remedy)
        rows = raw_rows(source, bad_rows, options.rows, spool)
        chosen = chosen_features(left_open, rows)
    statistics = collect(rows)
    title = options.path[0] + f" and {more} more" * (more > 0)
    text = described(title, statistics, [*notes, *rows.notes], chosen)
    if (made / SCHEMA).exists():
        said = f"data.features=auto, where a key is absent here: {chosen}"
        comments = "".join(f"# {line}\n" for line in textwrap.wrap(said, WIDTH))
        (made / SCHEMA).write_text(comments + (made / SCHEMA).read_text("utf-8"), "utf-8")
    (made / TEXT).write_text(text, encoding="utf-8")
    # Imported here: matplotlib takes half a second, which --help need not wait for.
    from stampede.data.description.picture import draw

    draw(f"{title}: {int(statistics.rows.sum()):,} rows", statistics, made / PICTURE)
    return text


def _source(options: argparse.Namespace, out: Path, made: Path) -> tuple[Source, Schema, list[str]]:
    """The log, its schema with the features that `data.features: auto` adds, and notes."""
    split = from_key_values(options.set, Split, "--set")
    if options.schema and options.kind not in (None, "table"):
        raise SettingsError(f"--schema belongs to --kind table; found --kind {options.kind}")
    kind, schema, notes = "table" if options.schema else options.kind, options.schema, []
    if kind is None:
        guessed = guess(expand(options.path))
        kind, notes = guessed.kind, guessed.reason
        if guessed.schema is not None:
            schema = str(made / SCHEMA)
            text = yaml.safe_dump(guessed.schema, sort_keys=False, allow_unicode=True)
            Path(schema).write_text(text, encoding="utf-8")
            notes.append(f"the guessed schema is in {out / SCHEMA}; correct it and use --schema")
    plain, auto = (
        open_source(kind, options.path, split, schema=schema or "", features=features)
        for features in ("paper", "auto")
    )
    return plain, auto.log.schema, notes


def _stem(path: str) -> str:
    """`train` for `/data/train.tsv.gz`; for a glob, its letters and digits."""
    name = Path(path).resolve().name.split(".")[0]
    return "".join(c for c in name if c.isalnum() or c in "-_") or "data"


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; write a whole number of 1 or more")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    keys = "\n".join(f"  {key.path} = {yaml_value(key.default)}" for key in all_keys(Split))
    parser = argparse.ArgumentParser(
        prog="stampede describe",
        description="Show what is in a click log or a prepared folder, as text and as pictures.",
        epilog=f"keys of --set, with defaults:\n{keys}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    files = "files or globs (csv, tsv, parquet; .gz, .zst), or one prepared folder"
    add("path", nargs="+", help=files)
    add("--kind", choices=get_args(Kind), help="kind of log; default: guessed")
    add("--schema", metavar="FILE.yaml", help="schema of a table; default: guessed")
    add("--out", metavar="DIR", help="folder for the result; default: NAME-description")
    add("--rows", type=_at_least_one, metavar="N", help="read only the first N rows")
    add("--on-bad-row", choices=get_args(OnBadRow), default="error", help="default: error")
    split = "how to divide a log into parts, such as -s split=random"
    add("-s", "--set", action="append", default=[], metavar="KEY=VALUE", help=split)
    return parser


if __name__ == "__main__":
    sys.exit(main())
