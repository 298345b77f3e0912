"""CowClip in plain float64 PyTorch, written from the paper's equations, one row at a time."""

import math
from dataclasses import dataclass

import torch


@dataclass
class ReferenceTable:
    """A table with Adam's moments, in float64."""

    weights: torch.Tensor

    def __post_init__(self):
        self.weights = self.weights.double().clone()
        self.m = torch.zeros_like(self.weights)
        self.v = torch.zeros_like(self.weights)

    def step(
        self,
        grad,
        counts,
        t,
        *,
        lr,
        l2=0.0,
        betas=(0.9, 0.999),
        eps=1e-7,
        ratio=None,
        bound=1e-5,
        variant="reference",
        columns=None,
        rows="all",
        eps_placement="keras",
    ):
        """One step from a dense gradient `[rows, dim]` and counts `[rows]`.

        Without `ratio` nothing is clipped.
        """
        width = columns or self.weights.shape[1]
        b1, b2 = betas
        for i in range(len(self.weights)):
            if rows == "touched" and counts[i] == 0:
                continue
            w = self.weights[i]
            g = grad[i].double() + 2 * l2 * w
            if ratio is not None:
                norm = float(w[:width].norm())
                if variant == "reference":
                    t_i = ratio * max(norm, ratio * math.sqrt(width) * bound)
                else:
                    t_i = max(ratio * norm, bound)
                t_i *= max(int(counts[i]), 1)
                g_norm = float(g[:width].norm())
                if g_norm > t_i:
                    g[:width] *= t_i / g_norm
            self.m[i] = b1 * self.m[i] + (1 - b1) * g
            self.v[i] = b2 * self.v[i] + (1 - b2) * g * g
            if eps_placement == "keras":
                rate = lr * math.sqrt(1 - b2**t) / (1 - b1**t)
                self.weights[i] = w - rate * self.m[i] / (self.v[i].sqrt() + eps)
            else:
                rate = lr / (1 - b1**t)
                self.weights[i] = w - rate * self.m[i] / ((self.v[i] / (1 - b2**t)).sqrt() + eps)
