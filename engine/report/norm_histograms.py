"""Histograms of the norms of embeddings, from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stampede.engine.checkpoint import read_manifest
from stampede.engine.errors import RunFolderError
from stampede.engine.tables import read_field

# To a power of ten.
_BINS = 10

# Bins of the logarithm of a norm; zero, which has none, is counted apart.
_EDGES = np.linspace(-8, 3, 11 * _BINS + 1)

# Of fewer ids a histogram is noise; more rows want more memory than a report is worth.
FEWEST_IDS, MOST_IDS = 50, 20_000_000


class NormHistogram(NamedTuple):
    """A field's ids by the norm of their embedding.

    Attributes:
        ids: how many there are.
        middles: `[n]` of the bins, logarithm to base 10.
        shares: `[n]` of the ids in each bin.
        zeros: ids of norm 0.
    """

    ids: int
    middles: np.ndarray
    shares: np.ndarray
    zeros: int


def field_sizes(checkpoint: Path) -> dict[str, int]:
    """Ids of each field, in the order of the data.

    Raises:
        RunFolderError: the checkpoint is damaged.
    """
    return read_manifest(checkpoint).data.vocabulary_sizes


def norm_histograms(
    checkpoint: Path, advance: Callable[[], object] = lambda: None
) -> dict[str, NormHistogram]:
    """By field, those with `FEWEST_IDS` to `MOST_IDS` ids; one table is in memory at a time.

    Args:
        advance: called after each.

    Raises:
        RunFolderError: the checkpoint is damaged, or holds weights that are not finite.
    """
    found = {}
    for field, ids in field_sizes(checkpoint).items():
        if FEWEST_IDS <= ids <= MOST_IDS:
            found[field] = _histogram(checkpoint, field)
        advance()
    return found


def _histogram(checkpoint: Path, field: str) -> NormHistogram:
    norms = read_field(checkpoint, field).embedding.norm(dim=1).numpy()
    if not np.isfinite(norms).all():
        raise RunFolderError(f"{checkpoint}: field {field!r} holds weights that are not finite")
    positive = norms[norms > 0]
    heights, edges = np.histogram(np.log10(positive.clip(1e-8, 1e3)), _EDGES)
    filled = np.flatnonzero(heights)
    # An empty bin at each end brings the curve down to zero.
    kept = slice(max(filled[0] - 1, 0), filled[-1] + 2) if len(filled) else slice(0)
    middles = (edges[:-1] + edges[1:]) / 2
    return NormHistogram(
        len(norms), middles[kept], heights[kept] / len(norms), len(norms) - len(positive)
    )
