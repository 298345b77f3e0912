"""The picture of the way of a batch in How it works.

python docs/picture.py    # writes docs/images/batch.svg
"""

from __future__ import annotations

from pathlib import Path

from stampede.files import write_file

PICTURE = Path(__file__).parent / "images/batch.svg"

# As wide as a phone. Boxes have a colour of their own, so that their text can be read on a light
# page and on a dark one; arrows are grey enough for both.
WIDTH, HEIGHT, BOX, TALL = 384, 542, 168, 58
LEFT, RIGHT = 4, 196
INK, LINE = "#1b1b1f", "#8a8f98"
READ, FORWARD, BACKWARD = "#dfe3f6", "#d5efe6", "#fde6c8"

# x, y, colour, what it is in bold, and below.
BOXES = (
    (LEFT, 4, READ, "log, prepared", "memory-mapped arrays"),
    (LEFT, 94, READ, "batch", "ids, numbers, labels"),
    (LEFT, 184, FORWARD, "ids sent", "to the rank of the row"),
    (LEFT, 274, FORWARD, "tables", "rows sent back, pooled"),
    (LEFT, 364, FORWARD, "network", "a logit for each sample"),
    (RIGHT, 274, BACKWARD, "clip, then Adam", "|g| up to r |w| c"),
    (RIGHT, 184, BACKWARD, "by row", "gradients g, counts c"),
    (RIGHT, 364, BACKWARD, "dense Adam", "mean over the ranks"),
)
LOSS = (LEFT, 480, "loss", "mean over the global batch")

# Points of each arrow.
ARROWS = (
    ((88, 62), (88, 94)),
    ((88, 152), (88, 184)),
    ((88, 242), (88, 274)),
    ((88, 332), (88, 364)),
    ((88, 422), (88, 480)),
    ((280, 480), (280, 422)),
    ((196, 393), (172, 393)),
    ((374, 480), (374, 213), (364, 213)),
    ((280, 242), (280, 274)),
    ((196, 303), (172, 303)),
)


def picture() -> str:
    """The picture as SVG."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" '
        'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif">',
        "<title>The way of a batch: read, sent, looked up, through the network to the loss; back "
        "to the rows, clipped and updated</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" '
        f'markerHeight="5" orient="auto"><path d="M0 0 8 4 0 8z" fill="{LINE}"/></marker></defs>',
    ]
    for points in ARROWS:
        path = " ".join(f"{x} {y}" for x, y in points)
        lines.append(
            f'<path d="M{path}" fill="none" stroke="{LINE}" stroke-width="2" '
            'marker-end="url(#head)"/>'
        )
    for x, y, colour, title, text in BOXES:
        lines += _box(x, y, BOX, colour, title, text)
    x, y, title, text = LOSS
    lines += _box(x, y, WIDTH - 2 * LEFT, BACKWARD, title, text)
    return "\n".join([*lines, "</svg>", ""])


def _box(x: int, y: int, width: int, colour: str, title: str, text: str) -> list[str]:
    middle = x + width // 2
    return [
        f'<rect x="{x}" y="{y}" width="{width}" height="{TALL}" rx="7" fill="{colour}" '
        f'stroke="{LINE}"/>',
        f'<text x="{middle}" y="{y + 24}" text-anchor="middle" font-size="15" font-weight="600" '
        f'fill="{INK}">{title}</text>',
        f'<text x="{middle}" y="{y + 44}" text-anchor="middle" font-size="13" fill="{INK}">{text}'
        "</text>",
    ]


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    write_file(PICTURE, picture())
