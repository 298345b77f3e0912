"""What `stampede describe` and a run say of unseen ids; needs neither Polars nor PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

# Shares of unseen ids from which a column is told, and from which it is of no use.
_OFTEN_UNSEEN, MOSTLY_UNSEEN = 0.5, 0.98


def unseen_sentences(shares: Mapping[str, float], part: str) -> list[str]:
    """What follows for columns of which so large a share of a part's ids is not in training."""
    new = "their rows are scored by the other columns"
    useless = "leave it out, or keep a part that recurs, such as the hour of a time"
    sentences = []
    for least, most, result in ((_OFTEN_UNSEEN, MOSTLY_UNSEEN, new), (MOSTLY_UNSEEN, 1.1, useless)):
        columns = [f"{name} {share:.0%}" for name, share in shares.items() if least <= share < most]
        if columns:
            sentences.append(
                f"{', '.join(columns)}: this share of the {part} ids is not in the training part; "
                f"{result}"
            )
    return sentences
