"""What the model of the period before says of a period, on whose rows a new model is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# File in the period's run folder: `ScoredBefore.source`.
SCORED = "scored.json"


class ScoredBefore(NamedTuple):
    """What the model of the period before says of a period's rows, see `score_before`.

    Attributes:
        period: its number.
        metrics: see `evaluate`.
        source: what is known of the file with the ids of that model, see `source` of a prepared
            manifest.
    """

    period: int
    metrics: dict[str, Any]
    source: Mapping[str, Any]
