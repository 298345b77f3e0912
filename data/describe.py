"""Look at data: `python -m stampede.data.describe FILE-or-prepared-folder`; see `--help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from stampede.data.command import exit_status
from stampede.data.description.collector import collect
from stampede.data.description.guess import guess, to_yaml
from stampede.data.description.inputs import Described, PreparedInput, RawInput
from stampede.data.description.table import described
from stampede.data.errors import DataError
from stampede.data.prepared.manifest import MANIFEST
from stampede.data.raw import BadRows, expand
from stampede.data.raw.bad_rows import OnBadRow
from stampede.data.sources import Kind, open_source
from stampede.data.splits import Split
from stampede.settings import SettingsError, all_keys, from_key_values

TEXT, PICTURE, SCHEMA, BAD_ROWS = (
    "description.txt",
    "description.png",
    "schema.yaml",
    "bad_rows.jsonl",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Describe data; returns the exit status: 2 for a user's mistake."""
    parsed = _parser().parse_args(arguments)
    return exit_status(lambda: _describe(parsed))


def _describe(parsed: argparse.Namespace) -> None:
    out = Path(parsed.out or f"{_stem(parsed.path[0])}-description")
    try:
        text = describe(parsed, out)
    except OSError as failure:
        raise DataError(
            f"{failure.filename or out}: {failure.strerror or failure}; choose another folder "
            "with --out"
        ) from None
    print(text)
    print(f"{out / PICTURE} and {out / TEXT} were written")


def describe(options: argparse.Namespace, out: Path) -> str:
    """Write the description into a folder.

    Args:
        options: what `main` parses.
        out: the folder.

    Returns:
        The tables.

    Raises:
        DataError: the data cannot be used.
        SettingsError: the options or a schema cannot be used.
    """
    paths, notes = options.path, []
    if (Path(paths[0]) / MANIFEST).exists():
        if len(paths) > 1 or options.kind or options.schema or options.set:
            raise SettingsError(
                f"{paths[0]}: is a prepared folder; give it alone, without --kind, --schema, --set"
            )
        data: Described = PreparedInput(Path(paths[0]), options.rows)
        out.mkdir(parents=True, exist_ok=True)
    else:
        data = _raw(options, out, notes)
    statistics = collect(data)
    texts = {column.name: data.texts(column) for column in statistics.ids}
    title = paths[0] + f" and {len(paths) - 1} more" * (len(paths) > 1)
    text = described(title, statistics, data.kinds, texts, [*notes, *data.notes()])
    (out / TEXT).write_text(text, encoding="utf-8")
    # It takes half a second to load, which `--help` and mistakes need not wait for.
    from stampede.data.description.picture import draw

    draw(f"{title}: {int(statistics.rows.sum()):,} rows", statistics, out / PICTURE)
    return text


def _raw(options: argparse.Namespace, out: Path, notes: list[str]) -> RawInput:
    split = from_key_values(options.set, Split, "--set")
    if options.schema and options.kind not in (None, "table"):
        raise SettingsError(f"--schema belongs to --kind table; found --kind {options.kind}")
    kind, schema = options.kind, options.schema
    if schema:
        kind = "table"
    elif kind is None:
        guessed = guess(expand(options.path))
        kind = guessed.kind
        notes += guessed.reason
        if guessed.schema is not None:
            out.mkdir(parents=True, exist_ok=True)
            schema = str(out / SCHEMA)
            Path(schema).write_text(to_yaml(guessed.schema), encoding="utf-8")
            notes.append(f"the guessed schema is in {schema}; mend it and give it with --schema")
    source = open_source(kind, options.path, split, schema=schema or "", features="paper")
    out.mkdir(parents=True, exist_ok=True)
    aside = out / BAD_ROWS
    aside.unlink(missing_ok=True)
    return RawInput(source, BadRows(options.on_bad_row, aside, "--on-bad-row skip"), options.rows)


def _stem(path: str) -> str:
    """`train` of `/data/train.tsv.gz`; globs lose what no file name should have."""
    name = Path(path).resolve().name.split(".")[0]
    return "".join(c for c in name if c.isalnum() or c in "-_") or "data"


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; write a whole number of 1 or more")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    keys = "\n".join(f"  {key.path} = {key.default!r}" for key in all_keys(Split))
    parser = argparse.ArgumentParser(
        prog="stampede describe",
        description="Show what is in a click log or a prepared folder: a table, and a page of "
        "pictures.",
        epilog=f"keys of --set, with defaults:\n{keys}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("path", nargs="+", help="files or globs (csv, tsv, parquet; .gz, .zst), or one folder")
    add("--kind", choices=get_args(Kind), help="kind of log; default: guessed")
    add("--schema", metavar="FILE.yaml", help="schema of a table; default: guessed")
    add("--out", metavar="DIR", help="folder for the result; default: NAME-description")
    add("--rows", type=_at_least_one, metavar="N", help="look at the first N rows only")
    add("--on-bad-row", choices=get_args(OnBadRow), default="error", help="default: error")
    add(
        "-s",
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="how a log is divided into parts, such as -s split=random",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
