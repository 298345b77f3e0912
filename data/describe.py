"""The command `stampede describe`: shows what is in a click log."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_args

import yaml

from stampede.data.description.guess import chosen_features, guess
from stampede.data.description.statistics import (
    QUANTILES,
    TOPS,
    Column,
    Statistics,
    collect,
    least_width,
    read_rows,
    short,
)
from stampede.data.errors import DataError, OnBadRow, exit_status
from stampede.data.options import Split
from stampede.data.prepare import MOST_NEWER
from stampede.data.prepared.manifest import BAD_ROWS, MANIFEST, PARTS
from stampede.data.raw.files import expand
from stampede.data.raw.rows import BadRows
from stampede.data.sources import TEST, TRAIN, VALIDATION, Kind, open_source
from stampede.settings import SettingsError, all_keys, from_key_values, yaml_value

TEXT, PICTURE, SCHEMA = "description.txt", "description.png", "schema.yaml"

WIDTH = 100
_NAME = 18
# Slices in the table; the picture has more.
_SLICES = 12
_TOP = 3

# Shares and AUCs from which a column or a slice gets advice.
_MANY_UNSEEN, _ALL_UNSEEN, _LEAK, _ROW_NAMES = 0.2, 0.98, 0.95, 0.9


def _parser() -> argparse.ArgumentParser:
    keys = "\n".join(f"  {key.path} = {yaml_value(key.default)}" for key in all_keys(Split))
    parser = argparse.ArgumentParser(
        prog="stampede describe",
        description="Show what is in a click log, as text and as pictures.",
        epilog=f"keys of --set, with defaults:\n{keys}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("path", nargs="+", help="files or globs (csv, tsv, parquet; .gz, .zst)")
    add("--kind", choices=get_args(Kind), help="kind of log; default: guessed")
    add("--schema", metavar="FILE.yaml", help="schema of a table; default: guessed")
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
        out = Path(options.out or f"{stem}-description")
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

    return exit_status(run)


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; write a whole number of 1 or more")
    return int(text)


def _described(options: argparse.Namespace, out: Path, made: Path, spool: Path) -> str:
    """Write all files of `out` to `made`; returns the text."""
    if (Path(options.path[0]) / MANIFEST).exists():
        raise SettingsError(f"{options.path[0]} is a prepared folder; describe the log's files")
    split = from_key_values(options.set, Split, "--set")
    if options.schema and options.kind not in (None, "table"):
        raise SettingsError(f"--schema belongs to --kind table; found --kind {options.kind}")
    kind, schema, notes = "table" if options.schema else options.kind, options.schema, []
    if kind is None:
        kind, guessed, notes = guess(expand(options.path))
        if guessed is not None:
            schema = str(made / SCHEMA)
            text = yaml.safe_dump(guessed, sort_keys=False, allow_unicode=True)
            Path(schema).write_text(text, encoding="utf-8")
            notes.append(f"the guessed schema is in {out / SCHEMA}; correct it and use --schema")
    source, auto = (
        open_source(kind, options.path, split, schema=schema or "", features=features)
        for features in ("paper", "auto")
    )
    remedy = "--on-bad-row skip to leave such rows out"
    bad_rows = BadRows(options.on_bad_row, made / BAD_ROWS, remedy)
    rows = read_rows(source, bad_rows, options.rows, spool)
    chosen, statistics = chosen_features(auto.log.schema, rows), collect(rows)
    more = len(options.path) - 1
    title = options.path[0] + f" and {more} more" * (more > 0)
    text = _text(title, statistics, [*notes, *rows.notes], chosen)
    if (made / SCHEMA).exists():
        said = f"data.features=auto, where a key is absent here: {chosen}"
        comments = "".join(f"# {line}\n" for line in textwrap.wrap(said, WIDTH))
        (made / SCHEMA).write_text(comments + (made / SCHEMA).read_text("utf-8"), "utf-8")
    (made / TEXT).write_text(text, encoding="utf-8")
    # Imported here: matplotlib takes half a second, which --help need not wait for.
    from stampede.data.description.picture import draw

    draw(f"{title}: {int(statistics.rows.sum()):,} rows", statistics, made / PICTURE)
    return text


def _text(title: str, statistics: Statistics, notes: Sequence[str], features: str) -> str:
    blocks = [[*_wrapped(title, ""), *_indented(notes)], _parts(statistics), _slices(statistics)]
    if statistics.ids:
        blocks += [_ids(statistics), _top_ids(statistics)]
    if statistics.numbers:
        blocks += [_numbers(statistics), _quarters(statistics)]
    heading = "chosen by data.features=auto; a schema that has the key decides otherwise"
    blocks += [_between_parts(statistics), [heading, *_indented([features])]]
    if sentences := _advice(statistics):
        blocks.append(["advice", *_indented(sentences)])
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks) + "\n"


def _advice(statistics: Statistics) -> list[str]:
    """What to change before training: one sentence per finding."""
    columns: dict[str, list[str]] = {}
    for column in (*statistics.ids, *statistics.numbers):
        for sentence, shown in _about(column):
            columns.setdefault(sentence, []).append(short(column.name, 40) + shown)
    about_columns = [f"{', '.join(names)}: {sentence}" for sentence, names in columns.items()]
    return [*_about_parts(statistics), *about_columns]


def _about_parts(statistics: Statistics) -> Iterator[str]:
    for part in (TRAIN, VALIDATION, TEST):
        rows, clicks = statistics.rows[part], statistics.clicks[part]
        if rows and clicks in (0, rows):
            found = "only clicks" if clicks else "no clicks"
            yield f"the {PARTS[part]} part has {found}, so it has no AUC; choose another split"
    if statistics.newer >= MOST_NEWER:
        yield (
            f"{statistics.newer:.0%} of the training rows are newer than half of the test rows, as "
            "the log is not in the order of time: a split by rows is not a split by time; "
            "split=by_column splits at a date"
        )


def _about(column: Column) -> Iterator[tuple[str, str]]:
    """Findings about a column, each with what to print beside the column's name."""
    is_number = column.unseen is None
    if not (column.summary if is_number else column.distinct):
        yield "missing in all rows; leave it out", ""
        return
    one = column.summary[1] == column.summary[-1] if is_number else column.distinct == 1
    if one and not column.share("missing"):
        yield "the same in all rows; leave it out", ""
        return
    unseen = column.share("unseen", TEST) or 0.0
    if unseen >= _MANY_UNSEEN:
        remedy = "min_count=2 or more trains the row that they share, encode: hash spreads them"
        if unseen >= _ALL_UNSEEN:
            remedy = (
                "leave it out; for a time, use hour_of_day and weekday, as data.features=auto does"
            )
        finding = f"this share of the test ids is not in the training part; {remedy}"
        yield finding, f" {unseen:.0%}"
    elif not is_number and column.distinct > _ROW_NAMES * column.values.sum() > 100:
        yield "almost every row has its own id, like a row number; leave it out", ""
    if (column.alone or 0.0) >= _LEAK:
        finding = "this test AUC alone suggests that the value is known only after the click; "
        yield finding + "leave it out unless it is known before", f" {column.alone:.3f}"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )


def _indented(sentences: Iterable[str]) -> list[str]:
    return [line for sentence in sentences for line in _wrapped(sentence, "  ")]


def _line(name: str, cells: Iterable[str], width: int = 10) -> str:
    return f"{name:<{_NAME}}" + "".join(f"{cell:>{width}}" for cell in cells)


def _clicks(where: str, rows: int, clicks: int, of: int) -> str:
    return f"{where:<34}{rows:>16,}{rows / of:>10.2%}{clicks:>16,}{_rate(rows, clicks):>12}"


def _parts(statistics: Statistics) -> Iterator[str]:
    yield f"{'part':<34}{'rows':>16}{'share':>10}{'clicks':>16}{'click rate':>12}"
    total = statistics.rows.sum()
    for name, rows, clicks in zip(PARTS, statistics.rows, statistics.clicks, strict=True):
        yield _clicks(name, rows, clicks, total)
    yield _clicks("all", total, statistics.clicks.sum(), total)


def _slices(statistics: Statistics) -> Iterator[str]:
    """Rows and click rate over time, in slices at least as wide as the picture's."""
    first, last = (statistics.slices["start"][at] for at in (0, -1))
    slices = statistics.wider(least_width(first, last, statistics.by_time, _SLICES))
    over = "over time (UTC)" if statistics.by_time else "over rows, in their order"
    yield f"{over:<34}{'rows':>16}{'share':>10}{'clicks':>16}{'click rate':>12}"
    for start, rows, clicks in slices.select("start", "rows", "clicks").iter_rows():
        yield _clicks(f"  from {statistics.place(start)}", rows, clicks, statistics.rows.sum())


def _ids(statistics: Statistics) -> Iterator[str]:
    tops = "".join(f"{f'top {top}':>9}" for top in TOPS)
    yield f"{'id field':<{_NAME}}{'type':<11}{'distinct':>14}{'missing':>9}{tops}"
    for column in statistics.ids:
        covered = "".join(f"{_percent(column.coverage(top)):>9}" for top in TOPS)
        yield (
            f"{short(column.name):<{_NAME}}{column.kind[:10]:<11}{column.distinct:>14,}"
            f"{_percent(column.share('missing')):>9}{covered}"
        )
    yield "  top k: share of the present ids that the k most frequent ones cover"


def _top_ids(statistics: Statistics) -> Iterator[str]:
    yield _line("click rate by id", [f"{'id':>13}{'share':>8}{'rate':>6}"] * _TOP)
    for column in statistics.ids:
        cells = [
            f"{short(text, 12):>13}{rows / column.values.sum():>8.1%}{clicks / rows:>6.3f}"
            for text, (rows, clicks) in list(zip(column.top, column.rates, strict=True))[:_TOP]
        ]
        yield _line(short(column.name), cells)


def _numbers(statistics: Statistics) -> Iterator[str]:
    yield _line("number", ["missing", "mean", "min", *(f"{q:.0%}" for q in QUANTILES), "max"])
    for column in statistics.numbers:
        values = (f"{value:.4g}" for value in column.summary)
        yield _line(short(column.name), [_percent(column.share("missing")), *values])


def _quarters(statistics: Statistics) -> Iterator[str]:
    yield _line("click rate by size", ["missing", "to 25%", "25-50%", "50-75%", "from 75%"])
    for column in statistics.numbers:
        yield _line(short(column.name), (_rate(*counts) for counts in column.rates))


def _between_parts(statistics: Statistics) -> Iterator[str]:
    shown = [part for part, rows in enumerate(statistics.rows) if rows]
    shares = [(what, part) for what in ("missing", "unseen") for part in shown]
    yield _line("", [*(what for what, _ in shares), "alone"], 11)
    yield _line("column", [*(PARTS[part] for _, part in shares), "test AUC"], 11)
    for column in (*statistics.ids, *statistics.numbers):
        alone = "-" if column.alone is None else f"{column.alone:.4f}"
        cells = [_percent(column.share(what, part)) for what, part in shares]
        yield _line(short(column.name), [*cells, alone], 11)
    yield "  unseen: ids absent from the training part"
    yield "  alone: test AUC of the click rates that the column's ids or sizes have in training"


def _percent(share: float | None) -> str:
    """With two decimals: 0.01 % of a large log is many rows."""
    return "-" if share is None else f"{share:.2%}"


def _rate(rows: int, clicks: int) -> str:
    return f"{clicks / rows:.4f}" if rows else "-"


if __name__ == "__main__":
    sys.exit(main())
