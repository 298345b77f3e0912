"""Pictures by matplotlib: names as they are written, whole files."""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO

from matplotlib.figure import Figure
from matplotlib.text import Text


def as_written(texts: Iterable[Text]) -> None:
    """Show texts as they are: a name with dollar signs is no formula."""
    for text in texts:
        text.set_parse_math(False)


def to_png(figure: Figure, dpi: int = 120) -> bytes:
    """A picture as the content of a PNG file."""
    file = BytesIO()
    figure.savefig(file, dpi=dpi, format="png", metadata={"Software": None})
    return file.getvalue()
