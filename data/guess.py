"""Guesses the kind and the schema of a click log from its files' names and first rows."""

from __future__ import annotations

import io
import re
import shlex
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from stampede.data.errors import DataError
from stampede.data.formulas import (
    JSON,
    UNITS,
    fitting_format,
    hold_objects,
    part_of_objects,
    parts_of_objects,
    seconds_of_time,
    split,
)
from stampede.data.guess_columns import (
    MOST_PARTS,
    NAME_OF_AN_ID,
    number_or_ids,
    part_column,
    split_by,
)
from stampede.data.raw.files import check_no_json, read_blocks
from stampede.data.raw.formats import is_parquet, open_parquet, with_names_as_text
from stampede.data.raw.log import RawLog
from stampede.data.raw.nested import leaves, unnested
from stampede.data.raw.rows import BadRows
from stampede.data.raw.typed import LABEL, SPLIT, Labels, is_text, of_one, typed_label
from stampede.data.schema.schema import CRITEO, MISSING, Label, Schema
from stampede.data.sources import Kind
from stampede.settings import counted, cut, shown, yaml_value

LABELS = ("label", "click", "clicked", "is_click", "is_clicked", "target", "y")
# Columns with two values that are no labels, and with more that are.
_NO_LABELS, _RATINGS = ("sex", "gender"), ("rating", "ratings", "stars")
_NAME_OF_A_TIME = re.compile(
    r"(^|[^a-z])(time|timestamp|ts|date|datetime|day|when|at)($|[^a-z])|time(stamp)?$|[a-z]At$",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"-?\d+(\.\d+)?(_duplicated_\d+)?$")
_AVAZU = {"click", "hour", "C1", "banner_pos", "site_id", "device_ip", "C21"}

_HEAD_BYTES = 1 << 20
_HEAD_ROWS = 10_000
# Numbers without the name of a time are times if there are at least so many within so many seconds,
# and if their ranks correlate so much with the order of rows.
_FEWEST_TIMES, _LONGEST_LOG, _ASCENDING = 20, 5 * 365 * 86400, 0.9

# Between ids of a cell; other marks occur in texts that are one id.
_MARKS = ("|", "^")
# A field shares a table that has this part of its ids, if they are so many: the first number is for
# a field of several ids. Of long cells the last ids are kept.
_SHARED, _FEWEST_SHARED, _FEWEST_OF_ONE, _MOST_IDS = 0.5, 5, 20, 50


class Guess(NamedTuple):
    """What a log seems to be.

    Attributes:
        kind: of the log.
        schema: as in a schema file; None for a kind whose columns are known.
        reason: sentences that say why.
        split: keys of the configuration that split it by a column, if it has one for that.
        why: what each column seems to be, by its name in the schema.
    """

    kind: Kind
    schema: dict[str, Any] | None
    reason: list[str]
    split: Mapping[str, Any] = MappingProxyType({})
    why: Mapping[str, str] = MappingProxyType({})

    def schema_text(self) -> str:
        """The schema as a file, a line for each column with the reason beside it."""
        lines = []
        for key, value in (self.schema or {}).items():
            if key not in ("ids", "numbers"):
                lines.append(_with_reason(f"{key}: {yaml_value(value)}", self.why.get(f"#{key}")))
                continue
            lines.append(f"{key}:" + " {}" * (not value))
            lines += [
                _with_reason(f"  {yaml_value(name)}: {yaml_value(options)}", self.why.get(name))
                for name, options in value.items()
            ]
        body = "\n".join(lines) + "\n"
        return _first_line(body) + body


def _first_line(body: str) -> str:
    """That of a guessed schema; its check sum tells whether a user has changed the rest."""
    mark = f"{zlib.crc32(body.encode()):08x}"
    return f"# Guessed by `stampede describe` ({mark}): correct it, and delete what is no input.\n"


def is_as_guessed(schema_text: str) -> bool:
    """Whether a schema file is one that `describe` wrote and nobody has changed."""
    body = schema_text.partition("\n")[2]
    return schema_text == _first_line(body) + body


def _with_reason(line: str, reason: str | None) -> str:
    return f"{line}  # {reason}" if reason else line


def guess(files: Sequence[Path], label: str | None = None) -> Guess:
    """What a log seems to be.

    Args:
        label: the column of a table's label; None: guessed.

    Raises:
        DataError: the user has to name the label, or write a schema.
    """
    path = files[0]
    if is_parquet(path):
        with open_parquet(path) as file:
            rows = next(file.iter_batches(_HEAD_ROWS), file.schema_arrow.empty_table())
        frame = with_names_as_text(unnested(pl.from_arrow(rows), leaves(rows.schema)))
        return _table(files, frame, label, {})
    block = next(read_blocks(path), None)
    if block is None:
        raise DataError(f"{path}: is empty; write the path of the click log")
    end = block.data.rfind(b"\n", 0, _HEAD_BYTES) + 1
    head = block.data[: end or _HEAD_BYTES].decode("utf-8", "replace")
    line = head.split("\n", 1)[0].rstrip("\r")
    check_no_json(path, line.encode())
    is_criteo = line.count("\t") == len(CRITEO.columns) - 1 and line.split("\t", 1)[0] in ("0", "1")
    if is_criteo and label is None:
        days = len(files) > 1 and all(re.search(r"day_?\d+", file.name) for file in files)
        kind: Kind = "criteo_1tb" if days else "criteo_kaggle"
        reason = f"line 1 of {path} has {len(CRITEO.columns)} columns separated by tabs"
        return Guess(kind, None, [f"guessed --kind {kind}: {reason}"])
    if set(line.split(",")) >= _AVAZU and label is None:
        return Guess("avazu", None, [f"guessed --kind avazu: line 1 of {path} is its header"])
    separator = max("\t,;|", key=line.count)
    written = {"separator": separator}
    frame = _delimited_head(path, head, separator)
    objects = parts_of_objects(one.name for one in frame if hold_objects(one))
    parts = (part_of_objects(column, name) for name, column in objects.items())
    frame = frame.with_columns(parts).drop(set(objects.values()))
    return _table(files, frame, label, written)


def _label_column(path: Path, head: pl.DataFrame, given: str | None) -> tuple[str, str]:
    """The column of the label, and why."""
    if given is not None:
        if given not in head.columns:
            found = cut(", ".join(map(shown, head.columns)))
            raise DataError(f"{path}: --label {shown(given)}: no such column; write one of {found}")
        return given, "given by --label"
    named = (name for word in LABELS for name in head.columns if name.lower() == word)
    if (name := next(named, None)) is not None:
        return name, "named like a label"
    of_two = _of_two_values(head)
    # Numbers as names are a row: the file has no header line.
    if not any(_NUMBER.match(name) for name in head.columns):
        if len(of_two) == 1:
            others = [name for name in head.columns if name.lower() in _NO_LABELS]
            besides = f" besides {others[0]}" if others else ""
            return of_two[0], f"the only column with two values{besides}"
        rated = [name for name in head.columns if name.lower() in _RATINGS]
        if len(rated) == 1 and not of_two:
            return rated[0], "a rating, and no other column looks like a label"
    raise DataError(_which_label(path, head, of_two))


def _of_two_values(head: pl.DataFrame) -> list[str]:
    flat = [series for series in head if not series.dtype.is_nested()]
    of_two = [series.name for series in flat if series.drop_nulls().n_unique() == 2]
    return [name for name in of_two if name.lower() not in _NO_LABELS]


def _which_label(path: Path, head: pl.DataFrame, of_two: list[str]) -> str:
    """What to write if no column is certainly the label: every column, and the command."""
    rest = [name for name in head.columns if name not in of_two]
    shown_first, most = [*of_two, *rest], 40
    width = min(30, max(len(_word(name)) for name in shown_first[:most]))
    lines = []
    for name in shown_first[:most]:
        present = head[name].drop_nulls()
        some = present.head(200).unique(maintain_order=True).head(3)
        values = ", ".join(str(one)[:20] for one in some.to_list())
        distinct = "" if present.dtype.is_nested() else f"{counted(present.n_unique(), 'value')}: "
        lines.append(cut(f"  {_word(name):<{width}}  {distinct}{values}"))
    more = len(shown_first) - most
    lines += [f"  and {more:,} more columns"] * (more > 0)
    command = f"stampede describe {shlex.quote(str(path))} --label"
    typed = [shlex.quote(name) for name in of_two[:5]] or ["COLUMN"]
    why = "no column has two values" if not of_two else f"{', '.join(of_two[:5])} have two values"
    return "\n".join([
        f"{path}: cannot tell which column is the label: none is named {', '.join(LABELS)}, and "
        f"{why}; write",
        *(f"  {command} {name}" for name in typed),
        "or a schema file, given with --schema (if line 1 is a row and not a header, with "
        "`columns: [label, user, item]`). The columns are",
        *lines,
    ])  # fmt: skip


def _word(name: str) -> str:
    """A column's name on one line of a list."""
    text = name if name.isprintable() else ascii(name)
    return text if len(text) <= 30 else text[:28] + ".."


def _table(
    files: Sequence[Path], head: pl.DataFrame, given: str | None, written: dict[str, Any]
) -> Guess:
    path = files[0]
    label, why_label = _label_column(path, head, given)
    section, said = _label(path, head[label])
    rest = head.drop(label)
    unusable = [one for one in rest if not is_text(of_one(one.dtype))]
    rest = rest.drop(one.name for one in unusable)
    split, parts, why_parts = _split(files, rest, written)
    rest = rest.drop(parts) if parts else rest
    times = _times(rest)
    time, why = (times[0] if times else None), {"#label": why_label}
    schema: dict[str, Any] = {**written, "label": section, "ids": {}, "numbers": {}}
    left_out = [f"{one.name} ({_stored_as(one.dtype)})" for one in unusable]
    left_out += [f"{one['column']} (a time)" for one in times[1:]]
    fractions = []
    for series in rest.drop([one["column"] for one in times]):
        name = re.sub(r"[^A-Za-z0-9_-]", "_", series.name).lstrip("_-")
        options = {} if name == series.name else {"column": series.name}
        if not name or name in why or series.dtype.is_temporal():
            left_out.append(series.name)
        elif _holds_lists_of_fractions(series, written.get("separator")):
            fractions.append(series.name)
        elif mark := _mark(series, written.get("separator")):
            schema["ids"][name], why[name] = {**options, "separator": mark}, "lists of ids"
        else:
            is_number, why[name] = number_or_ids(series)
            schema["numbers" if is_number else "ids"][name] = options
    if not schema["ids"]:
        raise DataError(
            f"{path}: found no column of ids (texts or whole numbers) besides the label {label!r}; "
            "write a schema file and give it with --schema"
        )
    weighted = _weighted(head, schema["ids"], fractions)
    others = [one for one in fractions if one not in weighted.values()]
    left_out += [f"{one} (lists of fractions; `weights` of ids?)" for one in others]
    shared, long = _shared(head, schema["ids"]), _cut_long(head, schema["ids"])
    another = "" if given else "; --label COLUMN names another"
    reason = [f"guessed a table: label {label!r}, {why_label}{another}"]
    reason += [_listed_by_reason(kind, schema[kind], why) for kind in ("ids", "numbers")]
    if time is None:
        reason.append("found no time; if a column is one, write it as `time` of the schema")
    else:
        schema["time"] = time
        form = "dates" if head[time["column"]].dtype.is_temporal() else "seconds since 1970"
        form = {"milliseconds": "milliseconds since 1970"}.get(
            time.get("format", ""), time.get("format", form)
        )
        reason.append(f"time: {time['column']!r}, as {form}")
    if left_out:
        reason.append(f"left out: {_listed(left_out)}")
    if parts:
        reason.append(f"split by {parts!r}: {why_parts}")
    reason += [
        f"{name} has ids of {options['share']}, so it uses that table; correct it if they only "
        "look alike"
        for name, options in shared.items()
    ]
    reason += [
        f"{column} has a number for each id of {name}, so it is its weights"
        for name, column in weighted.items()
    ]
    reason += [
        f"{name} has up to {most} ids in a cell, of which the last {_MOST_IDS} are kept (max_ids)"
        for name, most in long.items()
    ]
    return Guess("table", schema, [*reason, *filter(None, [said])], split, why)


def _stored_as(kind: pl.DataType) -> str:
    """What values are that cannot be read as text."""
    of = of_one(kind)
    known = {pl.Binary: "bytes", pl.Duration: "durations"}
    word = known.get(of.base_type(), "lists" if isinstance(of, pl.List | pl.Array) else str(of))
    return word if of is kind else f"lists of {word}"


def _listed_by_reason(kind: str, names: dict[str, Any], why: dict[str, str]) -> str:
    by_reason: dict[str, list[str]] = {}
    for name in names:
        by_reason.setdefault(why[name], []).append(name)
    groups = [f"{', '.join(group)} ({reason})" for reason, group in by_reason.items()]
    return cut(f"{kind}: " + ("; ".join(groups) or "none"))


def _split(
    files: Sequence[Path], head: pl.DataFrame, written: dict[str, Any]
) -> tuple[dict[str, Any], str, str]:
    """Keys that split the log by a column of parts, that column's name, and why; or nothing."""
    column = part_column(head)
    if column is None:
        return {}, "", ""
    # All rows, as they may be sorted by part; nothing else is read.
    schema = Schema.model_validate({**written, "label": None, "ids": {"part": {"column": column}}})
    values: set[str] = set()
    for chunk in RawLog(schema, files, column).chunks(BadRows("skip")):
        values |= set(chunk.frame[SPLIT].drop_nulls())
        if len(values) > MOST_PARTS:
            return {}, "", ""
    split, why = split_by(column, values)
    return split, column if split else "", why


def _mark(series: pl.Series, of_columns: str | None) -> str | None:
    """What is between the ids of a column's cells; None if they hold one each."""
    if isinstance(series.dtype, pl.List | pl.Array):
        return "|"
    if series.dtype != pl.String:
        return None
    present = series.drop_nulls()
    if len(present) and present.str.contains(r"^\s*\[.*\]\s*$").all():
        return JSON
    marks = (mark for mark in _MARKS if mark != of_columns)
    return next((one for one in marks if present.str.contains(one, literal=True).any()), None)


def _holds_lists_of_fractions(series: pl.Series, of_columns: str | None) -> bool:
    if isinstance(series.dtype, pl.List | pl.Array):
        return series.dtype.inner.is_float()
    mark = _mark(series, of_columns)
    if mark is None:
        return False
    texts = series.to_frame().select(split(pl.col(series.name), mark).explode()).to_series()
    numbers = texts.drop_nulls().cast(pl.Float64, strict=False)
    return numbers.null_count() == 0 and bool((numbers != numbers.round()).any())


def _shared(head: pl.DataFrame, ids: dict[str, Any]) -> dict[str, Any]:
    """Let fields share the table of another one that has most of their ids; returns these fields.

    Fields of one id have tables of their own first, then those of several, the largest first.
    Whole numbers and short codes look alike by chance: two fields of one id must have texts and a
    word of their names in common, two of several ids texts.
    """
    words = {name: set(re.findall(r"[a-z]{3,}", name.lower())) for name in ids}
    found = {name: _distinct(_cells(head, name, given)) for name, given in ids.items()}
    are_texts = {name: not all(map(_NUMBER.match, known)) for name, known in found.items()}
    has_several = {name: "separator" in given for name, given in ids.items()}
    owners: list[str] = []
    shared = {}
    for name in sorted(ids, key=lambda name: (has_several[name], -len(found[name]))):
        common = {
            owner: len(found[owner] & found[name])
            for owner in owners
            if has_several[owner] != has_several[name]
            or (
                are_texts[owner]
                and are_texts[name]
                and (has_several[name] or words[owner] & words[name])
            )
        }
        # Of owners that have as many, the one with the fewest others.
        best = max(common, key=lambda owner: (common[owner], -len(found[owner])), default="")
        fewest = _FEWEST_SHARED if has_several[name] else _FEWEST_OF_ONE
        if len(found[name]) >= fewest and common.get(best, 0) >= _SHARED * len(found[name]):
            ids[name]["share"] = best
            shared[name] = ids[name]
        else:
            owners.append(name)
    return shared


def _cut_long(head: pl.DataFrame, ids: dict[str, Any]) -> dict[str, int]:
    """Keep the last ids of long cells; returns the most ids of a cell by field that has them."""
    found = {}
    for name, given in ids.items():
        if "separator" in given:
            most = _cells(head, name, given).list.len().max() or 0
            if most > _MOST_IDS:
                given.update(max_ids=_MOST_IDS, keep="last")
                found[name] = most
    return found


def _weighted(head: pl.DataFrame, ids: dict[str, Any], columns: Sequence[str]) -> dict[str, str]:
    """Take lists of fractions as the weights of the one field that has as many ids in each cell.

    Returns the columns by field.
    """
    found = {}
    several = {name: given for name, given in ids.items() if "separator" in given}
    for column in columns:
        fits = []
        for name, given in several.items():
            weights = _cells(head, column, {"separator": given["separator"]})
            counts = _cells(head, name, given).list.len(), weights.list.len()
            if counts[0].n_unique() > 1 and counts[0].equals(counts[1], check_names=False):
                fits.append(name)
        if len(fits) == 1 and fits[0] not in found:
            ids[fits[0]]["weights"] = found[fits[0]] = column
    return found


def _cells(head: pl.DataFrame, name: str, given: Mapping[str, Any]) -> pl.Series:
    """What a field reads: an id in each cell, or a list of them."""
    cells = head[given.get("column", name)]
    if isinstance(cells.dtype, pl.Array):
        return cells.arr.to_list()
    if "separator" not in given or cells.dtype != pl.String:
        return cells
    return cells.to_frame().select(split(pl.col(cells.name), given["separator"])).to_series()


def _distinct(cells: pl.Series) -> set[str]:
    """The ids of a field as texts."""
    each = cells.explode() if isinstance(cells.dtype, pl.List | pl.Array) else cells
    return set(each.drop_nulls().cast(pl.String)) - {"", *MISSING}


def _delimited_head(path: Path, head: str, separator: str) -> pl.DataFrame:
    try:
        return pl.read_csv(
            io.StringIO(head),
            separator=separator,
            n_rows=_HEAD_ROWS,
            infer_schema_length=_HEAD_ROWS,
            null_values=MISSING,
            truncate_ragged_lines=True,
            ignore_errors=True,
        )
    except pl.exceptions.PolarsError as failure:
        reason = cut(str(failure).splitlines()[0])
        raise DataError(
            f"{path}: cannot be read as CSV ({reason}); write a schema file and give it with "
            "--schema"
        ) from None


def _label(path: Path, values: pl.Series) -> tuple[str | dict[str, Any], str]:
    """The section `label` of a schema, and a sentence if it is not the column alone."""
    name, present = values.name, values.drop_nulls()
    frame, rules = present.to_frame(), {"column": name}
    if values.dtype.is_nested():
        return name, ""
    label = Label(column=name)
    try:
        typed = typed_label(label, frame.schema)
    except DataError as failure:
        raise DataError(f"{path}: {failure}") from None
    found = frame.select(typed.values.alias(LABEL), bad=typed.is_bad)
    if not found["bad"].any():
        with suppress(DataError):
            Labels("", label).checked(found, path)
            return name, ""
    if values.dtype.is_numeric():
        rules["at_least"] = present.filter(present > present.mean()).min()
    else:
        counts = present.cast(pl.String).value_counts(sort=True)
        rules["positive"] = [counts[name][-1]]
    shown_rule = ", ".join(f"{key}: {value}" for key, value in rules.items())
    return rules, f"the label has values other than 0 and 1; guessed {{{shown_rule}}}: correct it"


def _times(head: pl.DataFrame) -> list[dict[str, str]]:
    """The columns of times, each as the section `time` of a schema, the likeliest first."""
    found: list[tuple[bool, dict[str, str]]] = []
    for series in head:
        present = series.drop_nulls()
        is_named = bool(_NAME_OF_A_TIME.search(series.name))
        if series.dtype in (pl.Datetime, pl.Date):
            found.append((is_named, {"column": series.name}))
            continue
        format = fitting_format(present)
        # Any number may be an id or a price: times lie within a few years.
        is_number = format in (*UNITS, "%Y%m%d", "%Y%m%d%H")
        if is_number and NAME_OF_AN_ID.search(series.name):
            continue
        if format is None or (is_number and not is_named and not _looks_timed(present, format)):
            continue
        section = {"column": series.name} | ({} if format == "seconds" else {"format": format})
        found.append((is_named, section))
    return [section for _, section in sorted(found, key=lambda one: not one[0])]


def _looks_timed(numbers: pl.Series, format: str) -> bool:
    """Whether numbers that could be times are many, within a few years, and mostly ascend."""
    kind = numbers.dtype
    seconds = numbers.to_frame().select(seconds_of_time(numbers.name, kind, format)).to_series()
    span = seconds.max() - seconds.min()
    if seconds.n_unique() < _FEWEST_TIMES or span >= _LONGEST_LOG:
        return False
    rank = seconds.rank().to_numpy()
    return np.corrcoef(rank, np.arange(len(rank)))[0, 1] > _ASCENDING


def _listed(names: Sequence[str]) -> str:
    return cut(", ".join(map(shown, names[:12])) + ", ..." * (len(names) > 12))
