"""The constants of the newest steps, from which missed ones are replayed."""

from __future__ import annotations

import torch
from torch import Tensor


class StepHistory:
    """Constants of the steps after step `first`, up to step `now`.

    Args:
        window: how many of the newest steps are kept at least.
        device: of the rows.

    Attributes:
        constants: `[steps, 3]` float32; entry `k` belongs to step `first + 1 + k`, see
            `stampede.optim.rules.adam.step_constants`.
        first: no row is at an earlier step.
        now: number of the newest step.
    """

    def __init__(self, window: int, device: torch.device) -> None:
        self._window = window
        # Room for two windows, so that it is seldom moved.
        self.constants = torch.empty(2 * window, 3, device=device)
        self.first = self.now = 0

    def reset(self, step: int) -> None:
        """All rows are at `step`."""
        self.first = self.now = step

    def begin(self, constants: tuple[float, float, float]) -> Tensor:
        """Note the next step; returns its constants, `[1, 3]`."""
        if self.now - self.first == len(self.constants):
            self.constants[: self._window] = self.constants[self._window :].clone()
            self.first += self._window
        position = self.now - self.first
        self.now += 1
        # A number is passed to a device without waiting for it; a tensor would be copied.
        for place, value in enumerate(constants):
            self.constants[position, place].fill_(value)
        return self.constants[position : position + 1]

    def rewind(self, step: int) -> None:
        """Forget the steps after `step`, which no row has taken."""
        self.now = step
