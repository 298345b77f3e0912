"""Helen in plain float64 PyTorch, written from the paper's and the repository's formulas.

Tables are ordinary dense arrays, gradients come from autograd through the whole loss, L2 stands in
the loss as `l2 * ||w||^2`, and counts are given.
"""

import math
from dataclasses import dataclass, field

import torch


@dataclass
class ReferenceHelen:
    """All parameters by name, of which `tables` are embedding tables in the repository's sense."""

    weights: dict
    tables: tuple
    lr: float = 1e-3
    rho: float = 0.05
    bound: float = 0.3
    betas: tuple = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    l2: dict = field(default_factory=dict)
    net_pert: bool = False
    dense_norm: str = "all"
    touched_only: tuple = ()

    def __post_init__(self):
        self.weights = {name: w.detach().double().clone() for name, w in self.weights.items()}
        self.m = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.v = {name: torch.zeros_like(w) for name, w in self.weights.items()}

    def gradients(self, loss, at, counts):
        """Gradients at `at`, and the loss without its L2 part."""
        leaves = {name: w.clone().requires_grad_() for name, w in at.items()}
        data = loss(leaves)
        total = data + sum(c * leaves[name].square().sum() for name, c in self.l2.items())
        found = torch.autograd.grad(total, list(leaves.values()))
        grads = dict(zip(leaves, found, strict=True))
        for name in self.touched_only:
            grads[name][counts[name] == 0] = 0.0
        return grads, float(data.detach())

    def step(self, loss, counts, t):
        """Step number `t`, from 1. Returns the loss before it.

        `loss` maps a dict of weights to a scalar, `counts` a table's name to `[rows]` counts.
        """
        first, value = self.gradients(loss, self.weights, counts)
        norms = {name: math.sqrt(float(g.square().sum())) for name, g in first.items()}
        if self.dense_norm == "all":
            dense_norm = math.sqrt(sum(norm**2 for norm in norms.values()))
        else:
            dense_norm = norms[self.tables[-1]]

        moved = {}
        for name, w in self.weights.items():
            moved[name] = w.clone()
            if name in self.tables:
                most = int(counts[name].max())
                for i in range(len(w)):
                    factor = max(int(counts[name][i]) / most, self.bound)
                    moved[name][i] += self.rho / (norms[name] + 1e-12) * factor * first[name][i]
            elif self.net_pert:
                moved[name] += self.rho / (dense_norm + 1e-12) * first[name]

        second, _ = self.gradients(loss, moved, counts)
        for name in self.weights:
            takes_second = name in self.tables or self.net_pert
            self.adam(name, second[name] if takes_second else first[name], counts, t)
        return value

    def adam(self, name, grad, counts, t):
        w, b1, b2 = self.weights[name], *self.betas
        g = grad + self.weight_decay * w
        m = b1 * self.m[name] + (1 - b1) * g
        v = b2 * self.v[name] + (1 - b2) * g * g
        after = w - self.lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + self.eps)
        if name in self.touched_only:
            absent = counts[name] == 0
            m[absent], v[absent], after[absent] = (
                self.m[name][absent],
                self.v[name][absent],
                w[absent],
            )
        self.m[name], self.v[name], self.weights[name] = m, v, after
