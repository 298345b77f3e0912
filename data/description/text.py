"""Statistics and advice as text of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone

import polars as pl

from stampede.data.description.statistics import QUANTILES, TOPS, Column, Statistics, least_width
from stampede.data.prepared.manifest import PARTS
from stampede.data.sources import TEST, TRAIN, VALIDATION

WIDTH = 100
_NAME = 18
# Slices of the table; the picture has more.
_SLICES = 12
_TOP = 3

# Shares and AUCs from which on something is said.
_MANY_UNSEEN, _ALL_UNSEEN, _LEAK, _ROW_NAMES, _LARGE_SLICE = 0.2, 0.98, 0.95, 0.9, 1 / 3


def described(
    title: str, statistics: Statistics, notes: Sequence[str], features: Sequence[str] = ()
) -> str:
    """All tables.

    Args:
        title: heading.
        statistics: of the data.
        notes: sentences below the heading.
        features: what `data.features: auto` will choose.
    """
    head = [*_wrapped(title, ""), *(line for note in notes for line in _wrapped(note, "  "))]
    blocks = [head, _parts(statistics), _over_time(statistics)]
    blocks += [_ids(statistics), _top_ids(statistics)] if statistics.ids else []
    blocks += [_numbers(statistics), _quarters(statistics)] if statistics.numbers else []
    blocks.append(_between_parts(statistics))
    if features:
        heading = "chosen by data.features=auto; a schema that has the key decides otherwise"
        blocks.append([heading, *(line for one in features for line in _wrapped(one, "  "))])
    if said := advice(statistics):
        blocks.append(["advice", *(line for one in said for line in _wrapped(one, "  "))])
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks) + "\n"


def advice(statistics: Statistics) -> list[str]:
    """What should be done before training: a sentence for each finding."""
    columns: dict[str, list[str]] = {}
    for column in (*statistics.ids, *statistics.numbers):
        for sentence, shown in _about(column):
            columns.setdefault(sentence, []).append(_cut(column.name, 40) + shown)
    told = [f"{', '.join(named)}: {sentence}" for sentence, named in columns.items()]
    return [*_about_parts(statistics), *told]


def _about_parts(statistics: Statistics) -> Iterator[str]:
    for part in (TRAIN, VALIDATION, TEST):
        rows, clicks = statistics.rows[part], statistics.clicks[part]
        if rows and clicks in (0, rows):
            found = "clicks" if clicks else "no clicks"
            yield f"the {PARTS[part]} part has {found} only: no AUC there; choose another split"
    days = _wider(statistics, max(statistics.width, 86400))
    if statistics.by_time and len(days) > 2:
        largest = int(days["rows"].arg_max())
        share = days["rows"][largest] / statistics.rows.sum()
        if share > _LARGE_SLICE:
            span = width(max(statistics.width, 86400), True)
            yield (
                f"{share:.0%} of the rows lie in {span} of {len(days)}, from "
                f"{place(days['start'][largest], True)} on: a share of the rows is not that share "
                "of the time; split=by_column divides them at a time"
            )


def _about(column: Column) -> Iterator[tuple[str, str]]:
    """What is said of a column, and what is shown beside its name."""
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
                "leave it out; of a time, hour_of_day and weekday serve instead, as "
                "data.features=auto makes them"
            )
        many = f" {unseen:.0%}"
        yield f"so many ids of the test rows are not in the training part; {remedy}", many
    elif not is_number and column.distinct > _ROW_NAMES * column.values.sum() > 100:
        yield "almost every row has an id of its own, as if it numbered the rows; leave it out", ""
    if (column.alone or 0.0) >= _LEAK:
        yield (
            "alone so large a test AUC, as if it were known only after the click; leave it out "
            "unless it is known before",
            f" {column.alone:.3f}",
        )


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )


def _parts(statistics: Statistics) -> Iterator[str]:
    yield f"{'part':<{_NAME}}{'rows':>16}{'share':>10}{'clicks':>16}{'click rate':>12}"
    total = statistics.rows.sum()
    for name, rows, clicks in (
        *zip(PARTS, statistics.rows, statistics.clicks, strict=True),
        ("all", total, statistics.clicks.sum()),
    ):
        share = percent(rows / total if total else None)
        yield f"{name:<{_NAME}}{rows:>16,}{share:>10}{clicks:>16,}{_rate(rows, clicks):>12}"


def _over_time(statistics: Statistics) -> Iterator[str]:
    """Rows and click rate, in slices of the picture's, several of which are one where needed."""
    first, last = (statistics.slices["start"][at] for at in (0, -1))
    slices = _wider(statistics, least_width(first, last, statistics.by_time, _SLICES))
    over = "time (UTC)" if statistics.by_time else "rows, in their order"
    heading = f"over {over}"
    yield f"{heading:<34}{'rows':>16}{'share':>10}{'clicks':>16}{'click rate':>12}"
    for start, rows, clicks in slices.select("start", "rows", "clicks").iter_rows():
        where = f"  from {place(start, statistics.by_time)}"
        share = percent(rows / statistics.rows.sum())
        yield f"{where:<34}{rows:>16,}{share:>10}{clicks:>16,}{_rate(rows, clicks):>12}"


def _wider(statistics: Statistics, wide: int) -> pl.DataFrame:
    """Slices of a larger width."""
    return statistics.slices.group_by(pl.col("start") // wide * wide).sum().sort("start")


def _ids(statistics: Statistics) -> Iterator[str]:
    tops = "".join(f"{f'top {top}':>9}" for top in TOPS)
    yield f"{'id field':<{_NAME}}{'type':<11}{'distinct':>14}{'missing':>9}{tops}"
    for column in statistics.ids:
        covered = "".join(f"{percent(column.coverage(top)):>9}" for top in TOPS)
        yield (
            f"{_cut(column.name):<{_NAME}}{column.kind[:10]:<11}{column.distinct:>14,}"
            f"{percent(column.share('missing')):>9}{covered}"
        )
    yield "  top k: share of the ids that are there which the k most frequent ones cover"


def _top_ids(statistics: Statistics) -> Iterator[str]:
    head = "".join(f"{'id':>13}{'share':>8}{'rate':>6}" for _ in range(_TOP))
    yield f"{'click rate by id':<{_NAME}}{head}"
    for column in statistics.ids:
        cells = [
            f"{_cut(_plain(text), 12):>13}{rows / column.values.sum():>8.1%}{clicks / rows:>6.3f}"
            for text, (rows, clicks) in list(zip(column.top, column.rates, strict=True))[:_TOP]
        ]
        yield f"{_cut(column.name):<{_NAME}}{''.join(cells)}"


def _numbers(statistics: Statistics) -> Iterator[str]:
    heads = ["missing", "mean", "min", *(f"{share:.0%}" for share in QUANTILES), "max"]
    yield f"{'number':<{_NAME}}" + "".join(f"{head:>10}" for head in heads)
    for column in statistics.numbers:
        shown = "".join(f"{f'{value:.4g}':>10}" for value in column.summary)
        yield f"{_cut(column.name):<{_NAME}}{percent(column.share('missing')):>10}{shown}"


def _quarters(statistics: Statistics) -> Iterator[str]:
    heads = ["missing", "to 25%", "25-50%", "50-75%", "from 75%"]
    yield f"{'click rate by size':<{_NAME}}" + "".join(f"{head:>10}" for head in heads)
    for column in statistics.numbers:
        cells = "".join(f"{_rate(rows, clicks):>10}" for rows, clicks in column.rates)
        yield f"{_cut(column.name):<{_NAME}}{cells}"


def _between_parts(statistics: Statistics) -> Iterator[str]:
    shown = [part for part, rows in enumerate(statistics.rows) if rows]
    heads = [(what, PARTS[part]) for what in ("missing", "unseen") for part in shown]
    heads.append(("alone", "test AUC"))
    yield f"{'':<{_NAME}}" + "".join(f"{what:>11}" for what, _ in heads)
    yield f"{'column':<{_NAME}}" + "".join(f"{part:>11}" for _, part in heads)
    for column in (*statistics.ids, *statistics.numbers):
        shares = [
            percent(column.share(what, part)) for what in ("missing", "unseen") for part in shown
        ]
        shares.append("-" if column.alone is None else f"{column.alone:.4f}")
        yield f"{_cut(column.name):<{_NAME}}" + "".join(f"{share:>11}" for share in shares)
    yield "  unseen: ids that the training part lacks"
    yield "  alone: test AUC of the click rates that the column's ids or sizes have in training"


def percent(share: float | None) -> str:
    """Two digits after the point: a share of 0.01 % of a large log is many rows."""
    return "-" if share is None else f"{share:.2%}"


def _rate(rows: int, clicks: int) -> str:
    return f"{clicks / rows:.4f}" if rows else "-"


def place(start: int, by_time: bool) -> str:
    """A time (UTC), or a row's number."""
    if not by_time:
        return f"row {start:,}"
    try:
        when = datetime.fromtimestamp(start, timezone.utc)
    except (OverflowError, ValueError, OSError):
        return f"{start} s"
    return f"{when:%Y-%m-%d %H:%M}" if start % 60 == 0 else f"{when:%Y-%m-%d %H:%M:%S}"


def width(wide: int, by_time: bool) -> str:
    """Width of a slice, for a person."""
    if not by_time:
        return f"{wide:,} rows"
    units = {"day": 86400, "hour": 3600, "minute": 60, "second": 1}
    unit, seconds = next(item for item in units.items() if wide % item[1] == 0)
    return f"{wide // seconds} {unit}" + "s" * (wide > seconds)


def _cut(name: str, most: int = _NAME - 1) -> str:
    return name if len(name) <= most else name[: most - 2] + ".."


def _plain(text: str) -> str:
    """On one line, whatever the id holds."""
    return text if text.isprintable() else repr(text)
