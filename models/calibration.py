"""Scores nearer to the share of clicks, where a network is more certain than it is right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class LogitCalibration(nn.Module):
    """`scale * logit + shift` of each goal, fitted after training; a module without parameters.

    A scale below 1 is temperature scaling (Guo et al., "On Calibration of Modern Neural Networks",
    section 4.2). The order of scores stays.

    Args:
        goals: of the logits; 1 for a single label.
    """

    # Buffers, so that a package and an ONNX file hold them. A checkpoint has them in its progress.
    values: Tensor

    def __init__(self, goals: int) -> None:
        super().__init__()
        self.register_buffer("values", torch.zeros(2, goals), persistent=False)
        self.set([])

    @torch.no_grad()
    def set(self, found: Sequence[Sequence[float]]) -> None:
        """Take scale and shift of each goal; without any, logits stay as they are."""
        pairs = found or [(1.0, 0.0)] * self.values.shape[1]
        self.values.copy_(torch.tensor(pairs, dtype=self.values.dtype).T)

    def forward(self, logits: Tensor) -> Tensor:
        """Of logits `[n]`, or `[n, goals]`."""
        return logits * self.values[0] + self.values[1]
