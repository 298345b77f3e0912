"""The command `stampede describe`: guesses the schema of a click log and shows its columns."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import polars as pl

from stampede import stores
from stampede.data.errors import DataError
from stampede.data.exit_status import exit_status
from stampede.data.formulas import bucket_rows
from stampede.data.guess import guess, is_as_guessed
from stampede.data.leaks import Alone, alone, counts_by_value, leak_sentences
from stampede.data.missing import missing_marks_sentence
from stampede.data.options import OnBadRow, PreparationOptions, Split
from stampede.data.prepared.manifest import BAD_ROWS, PARTS, TRAIN
from stampede.data.progress import RowProgress
from stampede.data.raw.files import expand
from stampede.data.raw.rows import BadRows
from stampede.data.raw.typed import LABEL, TIME, label_column
from stampede.data.schema.schema import Hashed, IdField, Integers, Quantiles, TimePart
from stampede.data.sources import Kind, Source, open_source
from stampede.data.split import Assignment
from stampede.data.unseen_ids import MOSTLY_UNSEEN, unseen_sentences
from stampede.settings import SettingsError, all_keys, counted, from_key_values, yaml_value

TEXT, SCHEMA = "description.txt", "schema.yaml"

WIDTH = 100
_PART, _VALUE = "#part", "#value"

# Of a number, for its AUC.
_BUCKETS = 50

# Share of distinct ids from which a column looks like a row's name.
_ROW_NAMES = 0.9


def _parser() -> argparse.ArgumentParser:
    keys = "\n".join(f"  {key.path} = {yaml_value(key.default)}" for key in all_keys(Split))
    parser = argparse.ArgumentParser(
        prog="stampede describe",
        description="Show what is in a click log, and write a schema to start from.",
        epilog=f"keys of --set, with defaults:\n{keys}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("path", nargs="+", help="files or globs (csv, tsv, parquet; .gz, .zst)")
    add("--kind", choices=get_args(Kind), help="kind of log; default: guessed")
    add("--schema", metavar="FILE.yaml", help="schema of a table; default: guessed")
    add("--label", metavar="COLUMN", help="column of the label in a guessed schema")
    add("--out", metavar="DIR", help="folder for the result; default: NAME-description")
    add("--rows", type=_at_least_one, metavar="N", help="read only the first N rows")
    add("--on-bad-row", choices=get_args(OnBadRow), default="error", help="default: error")
    split = "how to divide a log into parts, such as -s split=random"
    add("-s", "--set", action="append", default=[], metavar="KEY=VALUE", help=split)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)

    def run() -> None:
        # `train` for `/data/train.tsv.gz`; for a glob, its letters and digits.
        name = Path(options.path[0]).resolve().name.split(".")[0]
        stem = "".join(c for c in name if c.isalnum() or c in "-_") or "data"
        place = options.out or f"{stem}-description"
        try:
            # All files are copied at the end, or none.
            with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as spool:
                made = Path(folder)
                text = _described(options, place.rstrip("/"), made, Path(spool))
                written = sorted(file.name for file in made.iterdir())
                with stores.outgoing(place, overwrite=True) as out:
                    shutil.copytree(made, out, copy_function=shutil.copyfile, dirs_exist_ok=True)
                    if BAD_ROWS not in written:
                        (out / BAD_ROWS).unlink(missing_ok=True)
        except OSError as failure:
            raise DataError(
                f"{failure.filename or place}: {failure.strerror or failure}; choose another "
                "folder with --out (temporary files are in TMPDIR)"
            ) from None
        print(text)
        print(f"wrote to {place}: {', '.join(written)}")

    return exit_status(run)


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; write a whole number of 1 or more")
    return int(text)


def _described(options: argparse.Namespace, out: str, made: Path, spool: Path) -> str:
    """Write all files of `out` to `made`; returns the text."""
    split = from_key_values(options.set, Split, "--set")
    if options.schema and options.kind not in (None, "table"):
        raise SettingsError(f"--schema belongs to --kind table; found --kind {options.kind}")
    if options.label and (options.schema or options.kind):
        raise SettingsError(
            "--label belongs to a guessed schema; delete it, or --schema and --kind"
        )
    kind, schema, notes = "table" if options.schema else options.kind, options.schema, []
    given = options.schema
    if kind is None:
        guessed = guess(expand(options.path), options.label)
        kind, notes = guessed.kind, guessed.reason
        if guessed.schema is not None:
            schema, given = str(made / SCHEMA), f"{out}/{SCHEMA}"
            _check_unchanged(given, guessed.schema_text())
            Path(schema).write_text(guessed.schema_text(), encoding="utf-8")
            notes.append(f"the guessed schema is in {given}; correct it and use --schema")
        if guessed.split and not options.set:
            split = Split.model_validate(guessed.split)
    # Without the fields that data.features=auto adds: a run says which these are.
    as_given = PreparationOptions(features="paper", **split.model_dump(exclude_unset=True))
    source = open_source(kind, options.path, as_given, schema=schema or "")
    remedy = "--on-bad-row skip to leave such rows out"
    bad_rows = BadRows(options.on_bad_row, made / BAD_ROWS, remedy)
    rows, said = read_rows(source, bad_rows, options.rows, spool)
    kinds = {name: _kind(field) for name, field in source.log.schema.ids.items()}
    kinds |= dict.fromkeys(source.log.schema.numbers, "number")
    columns = [described_column(rows, name, kind) for name, kind in kinds.items()]
    more = len(options.path) - 1
    title = options.path[0] + f" and {more} more" * (more > 0)
    goals = source.log.schema.goals or [""]
    parts = {goal: parts_of(rows, label_column(goal)) for goal in goals}
    blocks = [
        [*_wrapped(title, ""), *_indented([*notes, *said])],
        *(_parts_table(of_goal, goal) for goal, of_goal in parts.items()),
        _columns_table(columns),
    ]
    about = (_about_parts(of_goal, goal) for goal, of_goal in parts.items())
    if advice := [*chain.from_iterable(about), *_about_columns(columns)]:
        blocks.append(["advice", *_indented(advice)])
    command = list(_command(kind, options.path, given, split))
    rows_of = [[of_goal[part][0] for of_goal in parts.values()] for part in range(len(PARTS))]
    empty = [name for name, counts in zip(PARTS, rows_of, strict=True) if not any(counts)]
    if empty and options.rows is None and split.split != "periods":
        lacking = f"no rows for {' and '.join(empty)}, so training refuses this log; "
        command = _indented([lacking + "give more rows, or another split with --set"])
    blocks.append(["to train", *command])
    text = "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks) + "\n"
    (made / TEXT).write_text(text, encoding="utf-8")
    return text


def _check_unchanged(schema: str, guessed: str) -> None:
    """Refuse to replace a schema file that a user has corrected."""
    if stores.is_url(schema):
        found = stores.read_object(schema)
    else:
        here = stores.local(schema)
        found = here.read_bytes() if here.is_file() else None
    text = guessed if found is None else found.decode("utf-8", "replace")
    if text != guessed and not is_as_guessed(text):
        raise DataError(
            f"{schema}: is not what describe wrote; write --schema {schema} to describe "
            "the log with it, --out ANOTHER_FOLDER to guess anew, or delete it"
        )


def _command(kind: Kind, path: Sequence[str], schema: str | None, split: Split) -> Iterator[str]:
    """The command that trains on the log, in lines for a shell."""
    keys: dict[str, Any] = {"path": path[0] if len(path) == 1 else list(path)}
    if schema:
        keys["schema_file"] = schema
    for key, value in split.model_dump(exclude_unset=True).items():
        # Digits need no quotes: the key reads them as text.
        whole = isinstance(value, list) and all(re.fullmatch(r"0|[1-9]\d*", v) for v in value)
        keys[key] = [int(one) for one in value] if whole else value
    words = ["python", "launch.py", f"configs/{kind}.yaml"]
    if kind == "criteo_1tb":
        # It has no file of its own.
        words[2:] = ["configs/criteo_kaggle.yaml", f"data.kind={kind}"]
    words += [f"data.{key}={yaml_value(value)}" for key, value in keys.items()]
    line = " "
    for word in map(shlex.quote, words):
        if len(line) + len(word) > WIDTH - 4 and line.strip():
            yield f"{line} \\"
            line = "   "
        line += f" {word}"
    yield line


def read_rows(
    source: Source, bad_rows: BadRows, limit: int | None, folder: Path
) -> tuple[pl.LazyFrame, list[str]]:
    """Rows of a log, copied to Parquet files in a folder.

    Args:
        limit: read only this many rows, bad ones included; None: all.

    Returns:
        Ids, numbers, labels of all goals, `#label`, with several goals that of the first, `#time`
        if the schema has one, and `#part`, an index into `PARTS`; null is missing. And sentences on
        how they were read.

    Raises:
        DataError: the log has no good row, or has a bad row and `bad_rows` refuses it.
    """
    log = source.log
    counts = log.counts(limit) if limit or source.split.needs_counts() else None
    assignment, rows = Assignment(source, counts), 0
    with RowProgress("describing", log.bytes) as progress:
        for read in log.chunks(bad_rows):
            chunk = read.take(read.numbers < counts[read.file]) if limit else read
            label = pl.col(label_column(next(iter(log.schema.label)))).alias(LABEL)
            frame = chunk.frame.with_columns(pl.Series(_PART, assignment.parts(chunk)), label)
            if len(frame):
                frame.write_parquet(folder / f"{rows:015d}.parquet", compression="lz4")
            rows += len(frame)
            progress.advance_to(chunk.position, len(frame))
            if limit and rows + bad_rows.count >= sum(counts):
                break
    if not rows:
        log.check_rows(log.counts())
        bad = counted(bad_rows.count, "bad row")
        raise DataError(f"{log.files[0]}: has no good row, but {bad}")
    frame = pl.scan_parquet(sorted(folder.glob("*.parquet")), glob=False)
    notes = [
        f"parts: split {source.split.split}, see --set",
        "" if limit is None else f"only the first {limit:,} rows were read (--rows)",
        f"left out {counted(bad_rows.count, 'bad row')}, listed in a file" * bool(bad_rows.count),
        missing_marks_sentence(bad_rows.marks_by_column()),
    ]
    if log.schema.goals:
        notes.append(f"clicks of the columns are those of the first goal, {log.schema.goals[0]!r}")
    if log.schema.time is not None:
        first, last = pl.from_epoch(TIME).min(), pl.from_epoch(TIME).max()
        span = frame.select(first=first, last=last).collect().row(0)
        notes.append("times: {:%Y-%m-%d %H:%M:%S} to {:%Y-%m-%d %H:%M:%S} (UTC)".format(*span))
    return frame, [note for note in notes if note]


def _kind(field: IdField) -> str:
    """The field's kind as the table shows it."""
    if isinstance(field, TimePart):
        return field.encode.replace("_", " ")
    if isinstance(field, Quantiles):
        # Its buckets are learned when a log is prepared.
        return "number"
    if isinstance(field, Hashed):
        return f"hash {field.buckets:,}"
    word = "integers" if isinstance(field, Integers) else "ids"
    return word if field.separator is None else f"many {word}"


@dataclass(frozen=True)
class Column:
    """An id field or a number; a row of a multi-valued field without an id counts as one id."""

    name: str
    kind: str
    values: int  # rows, or ids of a multi-valued field
    missing: float  # share of them
    distinct: int  # different ones that are not missing
    unseen: float | None  # share of the test ids that the training part lacks, if it is known
    alone: float | None  # test AUC of the click rates in the training part, if defined
    leak: Alone  # of a multi-valued field, whether a row has any id
    # The most frequent id, its rows and its clicks; minimum, median and maximum of a number.
    common: tuple[str, int, int] | tuple[float, float, float] | None


def described_column(frame: pl.LazyFrame, name: str, kind: str) -> Column:
    """What is in a column; its distinct ids, or all of its numbers, are in memory meanwhile."""
    values = frame.select(_PART, LABEL, pl.col(name).alias(_VALUE))
    of_lists = None
    if isinstance(values.collect_schema()[_VALUE], pl.List):
        of_lists = values.with_columns(pl.col(_VALUE).list.len().fill_null(0) > 0)
        values = values.explode(_VALUE)  # an empty list becomes null
    if kind == "number":
        table = values.collect()
        present = table[_VALUE].drop_nulls()
        distinct, unseen = present.n_unique(), None
        common = (present.min(), present.median(), present.max()) if len(present) else None
        # Sorted once: each quantile would sort anew.
        train = table.filter(pl.col(_PART) == TRAIN)[_VALUE].sort()
        edges = {train.quantile(i / _BUCKETS, "nearest") for i in range(1, _BUCKETS)} - {None}
        buckets = pl.Series(_VALUE, bucket_rows(table[_VALUE], sorted(edges)))
        counts = counts_by_value(table.with_columns(buckets).lazy(), _VALUE, _PART, LABEL)
        missing = len(table) - len(present)
    else:
        counts = counts_by_value(values, _VALUE, _PART, LABEL)
        known = counts.drop_nulls(_VALUE)
        distinct, missing = len(known), counts.filter(pl.col(_VALUE).is_null())["rows"].sum()
        top = known.top_k(1, by=["rows", _VALUE], reverse=[False, True])
        common = next(
            top.select(pl.col(_VALUE).cast(pl.String), "rows", "clicks").iter_rows(), None
        )
        new = known.filter(pl.col("train") == 0)["test"].sum()
        test = counts["test"].sum()
        unseen = new / test if test and counts["train"].sum() else None
    total = counts["rows"].sum()
    leak = found = alone(counts)
    if of_lists is not None:
        leak = alone(counts_by_value(of_lists, _VALUE, _PART, LABEL))
    return Column(name, kind, total, missing / total, distinct, unseen, found.auc, leak, common)


def parts_of(frame: pl.LazyFrame, label: str = LABEL) -> list[tuple[int, int]]:
    """Rows with that label, and clicks, of each of `PARTS`."""
    every = frame.group_by(_PART).agg(pl.col(label).count(), clicks=(pl.col(label) >= 0.5).sum())
    found = {part: counts for part, *counts in every.collect(engine="streaming").iter_rows()}
    return [tuple(found.get(part, (0, 0))) for part in range(len(PARTS))]


def _about_parts(parts: Sequence[tuple[int, int]], goal: str) -> Iterator[str]:
    of_goal = f" of the goal {goal!r}" if goal else ""
    for part, (count, clicks) in zip(PARTS, parts, strict=True):
        if count and clicks in (0, count):
            found = f"{'only' if clicks else 'no'} clicks{of_goal}"
            yield f"the {part} part has {found}, so it has no AUC; choose another split"


def _about_columns(columns: Sequence[Column]) -> list[str]:
    """What to change before training: one sentence per finding."""
    found: dict[str, list[str]] = {}
    for column in columns:
        if finding := _about(column):
            found.setdefault(finding, []).append(_short(column.name, 40))
    unseen = {column.name: column.unseen or 0.0 for column in columns}
    told = [f"{', '.join(names)}: {finding}" for finding, names in found.items()]
    of_columns = [(_short(column.name, 40), column.leak) for column in columns]
    return [*unseen_sentences(unseen, "test"), *told, *leak_sentences(of_columns, "test")]


def _about(column: Column) -> str:
    """What makes a column useless; empty if nothing does."""
    if not column.distinct:
        return "missing in all rows; leave it out"
    if column.distinct == 1 and not column.missing:
        return "the same in all rows; leave it out"
    is_told = column.kind == "number" or (column.unseen or 0.0) >= MOSTLY_UNSEEN
    if not is_told and column.distinct > _ROW_NAMES * column.values > 100:
        return "almost every row has its own id, like a row number; leave it out"
    return ""


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )


def _indented(sentences: Iterable[str]) -> list[str]:
    return [line for sentence in sentences for line in _wrapped(sentence, "  ")]


def _short(name: str, most: int) -> str:
    """A name of at most `most` characters, on one line."""
    name = name if name.isprintable() else repr(name)
    return name if len(name) <= most else name[: most - 2] + ".."


def _parts_table(parts: Sequence[tuple[int, int]], goal: str) -> Iterator[str]:
    title = f"part, of {_short(goal, 20)}" if goal else "part"
    yield f"{title:<34}{'rows':>16}{'share':>10}{'clicks':>16}{'click rate':>12}"
    rows, clicks = map(sum, zip(*parts, strict=True))
    for name, (count, clicked) in zip((*PARTS, "all"), (*parts, (rows, clicks)), strict=True):
        rate = f"{clicked / count:.4f}" if count else "-"
        yield f"{name:<34}{count:>16,}{count / max(rows, 1):>10.2%}{clicked:>16,}{rate:>12}"


def _columns_table(columns: Sequence[Column]) -> Iterator[str]:
    yield (
        f"{'column':<18}{'kind':<12}{'missing':>8}{'distinct':>13}{'unseen':>8}{'alone':>7}"
        "  most frequent id, or range"
    )
    for column in columns:
        unseen = "-" if column.unseen is None else f"{column.unseen:.2%}"
        alone = "-" if column.alone is None else f"{column.alone:.4f}"
        common = ""
        if column.common is not None and column.kind == "number":
            common = "{:.4g} .. {:.4g} .. {:.4g}".format(*column.common)
        elif column.common is not None:
            text, rows, clicks = column.common
            share = rows / column.values
            common = f"{_short(text, 12)} {share:.1%}, clicked {clicks / rows:.3f}"
        yield (
            f"{_short(column.name, 17):<18}{_short(column.kind, 11):<12}{column.missing:>8.2%}"
            f"{column.distinct:>13,}{unseen:>8}{alone:>7}  {common}"
        )
    yield "  unseen: share of the test part's ids that the training part lacks"
    yield "  alone: test AUC of the click rates that the column's ids or sizes have in training"
    yield "  range: minimum, median and maximum of a number"
