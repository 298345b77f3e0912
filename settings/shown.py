"""Values as a sentence shows them: short, whatever was given."""

from __future__ import annotations

import reprlib
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 4
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 12
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200

_LONGEST = 1500


def shown(value: Any) -> str:
    """`repr` of a value, cut where it is long or deep."""
    try:
        return _SHORT.repr(value)
    except (ValueError, RecursionError):
        # Of numbers with thousands of digits Python makes no text.
        return f"a {type(value).__name__} too large to show"


def cut(sentence: str) -> str:
    """A sentence without its middle where it is longer than anybody reads, and without characters
    that would do something to a terminal.
    """
    if len(sentence) > _LONGEST:
        sentence = f"{sentence[: _LONGEST // 2]} ... {sentence[-_LONGEST // 2 :]}"
    return "".join(_printable(character) for character in sentence)


def _printable(character: str) -> str:
    plain = character.isprintable() or character == "\n"
    return character if plain else repr(character)[1:-1]
