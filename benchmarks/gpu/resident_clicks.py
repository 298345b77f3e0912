"""Criteo-like clicks in device memory."""

from __future__ import annotations

import torch
from clicks import EXPONENT
from torch import Tensor

from stampede.data.samples import Samples
from stampede.data.synthetic import NUMBERS

_PIECE = 1 << 20


class ResidentClicks:
    """Rows of one part, drawn on the device and kept there.

    Args:
        rows: how many.
        sizes: rows of each field's table.
        device: of the rows.
        seed: of the draw.
    """

    def __init__(self, rows: int, sizes: list[int], device: torch.device, seed: int = 0) -> None:
        self.rows, self.device = rows, device
        draw = torch.Generator(device).manual_seed(seed)
        self._ids = torch.empty(rows, len(sizes), dtype=torch.int32, device=device)
        for first in range(0, rows, _PIECE):
            piece = self._ids[first : first + _PIECE]
            piece.copy_(drawn_ids(len(piece), sizes, draw))
        self._numbers = torch.rand(rows, NUMBERS, generator=draw, device=device)
        self._label = (torch.rand(rows, generator=draw, device=device) < 0.26).to(torch.uint8)

    def read(self, rows: Tensor) -> Samples:
        """See `stampede.data.Part`."""
        return Samples(self._ids[rows], self._numbers[rows], self._label[rows])

    def weight(self, rows: Tensor) -> None:
        """None: samples have no weights."""


def drawn_ids(rows: int, sizes: list[int], draw: torch.Generator) -> Tensor:
    """`[rows, fields]` ids by a power law, as `clicks.drawn` draws them."""
    size = torch.tensor(sizes, dtype=torch.float64, device=draw.device)
    # The inverse of a Zipf distribution, cut off at the table's size.
    power = 1.0 - EXPONENT
    unit = torch.rand(rows, len(sizes), generator=draw, device=draw.device, dtype=torch.float64)
    ids = (1.0 + unit * (size**power - 1.0)) ** (1.0 / power) - 1.0
    return torch.minimum(ids.long(), size.long() - 1)
