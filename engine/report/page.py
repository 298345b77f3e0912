"""The report as one HTML page that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from stampede.engine.report.drawing import Drawing

_STYLE = """
body { margin: 0 auto; max-width: 84rem; padding: 0 1rem 3rem; color: #111; background: #fff;
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 1.2rem 0 0.3rem; }
h2 { font-size: 1.15rem; margin: 1.6rem 0 0.4rem; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 32rem), 1fr));
  gap: 0 2.5rem; align-items: start; }
figure { margin: 0; }
img { display: block; max-width: 100%; height: auto; }
figcaption, .note { font-size: 0.9rem; color: #333; }
.note { border-left: 3px solid #777; padding-left: 0.6rem; margin: 0.5rem 0;
  overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.88rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #bbb; padding: 0.2rem 0.7rem 0.2rem 0; text-align: left;
  white-space: nowrap; }
td.number { text-align: right; }
th { border-bottom: 2px solid #111; vertical-align: bottom; }
pre { font-size: 0.8rem; overflow-x: auto; }
@media print { section { break-inside: avoid; } }
"""


@dataclass(frozen=True)
class Table:
    """A table of a page.

    Attributes:
        title: heading.
        note: a sentence above it.
        header, rows: cells; without rows the note stands alone.
    """

    title: str
    note: str
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def page(
    title: str,
    subtitle: str,
    notes: Sequence[str],
    tables: Sequence[Table],
    drawings: Sequence[Drawing],
    pictures: dict[str, bytes],
) -> str:
    """The page.

    Args:
        notes: sentences on runs that are not finished.
        tables: above the pictures, but for the last, which stands beneath them.
        pictures: PNG of each drawing that has a figure, by its name.
    """
    drawn = "\n".join(_picture(d, pictures[d.name]) for d in drawings if d.figure is not None)
    absent = [d for d in drawings if d.figure is None]
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(subtitle)}</p>",
        *map(_note, notes),
        *map(_table, tables[:-1]),
        f'<div class="pictures">\n{drawn}\n</div>',
        *map(_table, tables[-1:]),
    ]
    if absent:
        parts.append("<h2>Not in this report</h2>")
        parts += [_note(f"{d.title}: {' '.join(d.left_out)}") for d in absent]
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Browsers ask the server for an icon otherwise.
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _picture(drawing: Drawing, png: bytes) -> str:
    source = base64.b64encode(png).decode("ascii")
    notes = "".join(map(_note, drawing.left_out))
    return (
        f'<section id="{escape(drawing.name)}">\n<h2>{escape(drawing.title)}</h2>\n<figure>\n'
        f'<img alt="{escape(drawing.title)}: {escape(drawing.caption)}" '
        f'src="data:image/png;base64,{source}">\n'
        f"<figcaption>{escape(drawing.caption)}</figcaption>\n</figure>\n{notes}\n</section>"
    )


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _table(table: Table) -> str:
    text = f"<h2>{escape(table.title)}</h2>\n<p>{escape(table.note)}</p>"
    if not table.rows:
        return text
    header = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    classes = [""] + [_class(column) for column in list(zip(*table.rows, strict=True))[1:]]
    rows = "\n".join(
        "<tr>"
        + "".join(f"<td{c}>{escape(cell)}</td>" for c, cell in zip(classes, row, strict=True))
        + "</tr>"
        for row in table.rows
    )
    return (
        f'{text}\n<div class="scroll"><table>\n<thead><tr>{header}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody>\n</table></div>"
    )


def _class(column: Sequence[str]) -> str:
    """Numbers stand to the right, where they are all that a column has."""
    return ' class="number"' if all(cell[:1].isdigit() for cell in column if cell) else ""
