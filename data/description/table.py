"""Statistics as text of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone

from stampede.data.description.slices import LabelSlices
from stampede.data.description.statistics import (
    QUANTILES,
    TOPS,
    IdColumn,
    NumberColumn,
    Statistics,
)
from stampede.data.prepared.manifest import PARTS

WIDTH = 100
_NAME = 18


def described(
    title: str,
    statistics: Statistics,
    kinds: Mapping[str, str],
    texts: Mapping[str, list[str]],
    notes: Sequence[str],
) -> str:
    """All tables.

    Args:
        title: heading.
        statistics: of the data.
        kinds: by id field, a word for its kind.
        texts: by id field, its most frequent ids.
        notes: sentences below the heading.
    """
    head = [*_wrapped(title, ""), *(line for note in notes for line in _wrapped(note, "  "))]
    blocks = [head, list(_parts(statistics)), list(_over_time(statistics.slices))]
    if statistics.ids:
        blocks.append(list(_ids(statistics.ids, kinds, texts)))
    if statistics.numbers:
        blocks.append(list(_numbers(statistics.numbers, statistics.sampled)))
    blocks.append(list(_between_parts(statistics)))
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks) + "\n"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_on_hyphens=False,
    )


def _parts(statistics: Statistics) -> Iterator[str]:
    yield f"{'part':<{_NAME}}{'rows':>16}{'share':>10}{'clicks':>16}{'label rate':>12}"
    total = int(statistics.rows.sum())
    for name, rows, positives in (
        *zip(PARTS, statistics.rows, statistics.positives, strict=True),
        ("all", total, statistics.positives.sum()),
    ):
        rate = f"{positives / rows:.4f}" if rows else "-"
        share = percent(rows / total if total else None)
        yield f"{name:<{_NAME}}{rows:>16,}{share:>10}{positives:>16,}{rate:>12}"


def _over_time(slices: LabelSlices) -> Iterator[str]:
    table = slices.table
    if not len(table):
        yield "no rows"
        return
    rates = (table["positives"] / table["rows"]).to_list()
    places = [place(start, slices.by_time) for start in table["start"]]
    low, high = rates.index(min(rates)), rates.index(max(rates))
    yield (
        f"label rate over {'time' if slices.by_time else 'rows'}: {len(rates)} slices of "
        f"{width(slices)} from {places[0]}"
    )
    yield (
        f"  lowest {rates[low]:.4f} from {places[low]}, highest {rates[high]:.4f} from "
        f"{places[high]}"
    )


def _ids(
    columns: Sequence[IdColumn], kinds: Mapping[str, str], texts: Mapping[str, list[str]]
) -> Iterator[str]:
    tops = "".join(f"{f'top {top}':>9}" for top in TOPS)
    yield f"{'id field':<{_NAME}}{'type':<11}{'distinct':>14}{'missing':>9}{tops}  top id"
    for column in columns:
        covered = "".join(f"{percent(column.coverage(top)):>9}" for top in TOPS)
        line = (
            f"{_cut(column.name):<{_NAME}}{kinds[column.name][:10]:<11}{column.distinct:>14,}"
            f"{percent(column.by_part.missing_in_all()):>9}{covered}  "
        )
        yield line + _plain(next(iter(texts[column.name]), "-"))[: WIDTH - len(line)]
    yield "  top k: share of the ids that are there which the k most frequent ones cover"


def _numbers(columns: Sequence[NumberColumn], sampled: int | None) -> Iterator[str]:
    heads = ["missing", "mean", "min", *(f"{share:.0%}" for share in QUANTILES), "max"]
    yield f"{'number':<{_NAME}}" + "".join(f"{head:>10}" for head in heads)
    for column in columns:
        found = column.range
        values = [found.mean, found.low, *column.quantiles, found.high] if found.rows else []
        shown = "".join(f"{f'{value:.4g}':>10}" for value in values)
        missing = percent(column.by_part.missing_in_all())
        yield f"{_cut(column.name):<{_NAME}}{missing:>10}{shown}"
    if sampled is not None:
        yield f"  25% to 99%: quantiles of a random sample of {sampled:,} rows"


def _between_parts(statistics: Statistics) -> Iterator[str]:
    shown = [number for number, rows in enumerate(statistics.rows) if rows]
    heads = [f"missing {PARTS[number]}" for number in shown]
    heads += [f"unseen {PARTS[number]}" for number in shown]
    yield f"{'':<{_NAME}}" + "".join(f"{head.split()[0]:>13}" for head in heads)
    yield f"{'column':<{_NAME}}" + "".join(f"{head.split()[1]:>13}" for head in heads)
    columns = [*statistics.ids, *statistics.numbers]
    for column in columns:
        by_part = column.by_part
        if not by_part.known:
            continue
        shares = [by_part.missing_share(number) for number in shown]
        if by_part.unseen is not None:
            shares += [by_part.unseen_share(number) for number in shown]
        line = "".join(f"{percent(share):>13}" for share in shares)
        yield f"{_cut(column.name):<{_NAME}}{line}"
    yield "  unseen: ids that the training part lacks"


def percent(share: float | None) -> str:
    """Two digits after the point: a share of 0.01 % of a large log is many rows."""
    return "-" if share is None else f"{share:.2%}"


def place(start: int, by_time: bool) -> str:
    """A time (UTC), or a row's number."""
    if not by_time:
        return f"row {start:,}"
    try:
        when = datetime.fromtimestamp(start, timezone.utc)
    except (OverflowError, ValueError, OSError):
        return f"{start} s"
    return f"{when:%Y-%m-%d %H:%M}" if start % 60 == 0 else f"{when:%Y-%m-%d %H:%M:%S}"


def width(slices: LabelSlices) -> str:
    """Width of a slice, for a person."""
    if not slices.by_time:
        return f"{slices.width:,} rows"
    units = {"day": 86400, "hour": 3600, "minute": 60, "second": 1}
    unit, seconds = next(item for item in units.items() if slices.width % item[1] == 0)
    count = slices.width // seconds
    return f"{count} {unit}" + "s" * (count > 1)


def _cut(name: str) -> str:
    return name if len(name) < _NAME else name[: _NAME - 3] + ".."


def _plain(text: str) -> str:
    """On one line, whatever the id holds."""
    return text if text.isprintable() else repr(text)
