"""How much a checkpoint's manifest holds at most: one from elsewhere is not to fill the memory."""

from __future__ import annotations

from typing import Any

# A plan of 3,000 tables with two moments, of which the 30 largest lie on 512 processes each and the
# others on one, takes 12.5 MB and 650,000 values.
MOST_BYTES = 24 << 20

# Counted as commas and opening brackets. So many take 320 MB of memory at most, whoever wrote them.
# `[],[],` takes 30 times its bytes: a limit on these alone would be below real manifests.
_MOST_VALUES = 800_000

# Of a configuration: its keys, and characters of a dotted one, which is made of each.
_MOST_KEYS = 100_000
_LONGEST_KEY = 500


def check_text(text: bytes) -> None:
    """Check how much is in a text, before it is read as JSON or when it is to be written.

    Raises:
        ValueError: more than in any manifest.
    """
    values = sum(map(text.count, (b",", b"[", b"{")))
    if len(text) > MOST_BYTES or values > _MOST_VALUES:
        raise ValueError(
            f"a manifest of {len(text):,} bytes and {values:,} values, at most {MOST_BYTES:,} and "
            f"{_MOST_VALUES:,} are read"
        )


def check_keys(config: dict[str, Any]) -> None:
    """Check number and length of the dotted keys of a configuration.

    Raises:
        ValueError: more than in any configuration.
    """
    left, count = [(config, 0)], 0
    while left:
        section, before = left.pop()
        count += len(section)
        if count > _MOST_KEYS:
            raise ValueError(f"config: more than {_MOST_KEYS:,} keys")
        for key, value in section.items():
            length = before + len(key) + 1
            if length > _LONGEST_KEY:
                raise ValueError(f"config: a key of more than {_LONGEST_KEY} characters")
            if isinstance(value, dict):
                left.append((value, length))
