"""The clipping family and its base optimizers in plain float64 PyTorch, from the equations.

Written without the code under test: whole tables, dense gradients, one formula after the other.
"""

import math

import torch


class ReferenceTables:
    """Tables by name, in float64, with the state of their optimizer.

    Args:
        weights: by table, `[rows, dim]`.
        rule: `adam`, `rowwise_adam`, `adagrad`, `rowwise_adagrad`, `sgd` or `lion`.
        rows: `all` or `touched`.
        granularity, ratio, bound, threshold, variant, columns: the clip; columns may be by table.
        group: tables that `global` holds together; all by default.
    """

    def __init__(
        self,
        weights,
        *,
        rule="adam",
        lr=1e-3,
        l2=0.0,
        weight_decay=0.0,
        rows="all",
        betas=(0.9, 0.999),
        eps=1e-7,
        eps_placement="keras",
        momentum=0.0,
        granularity="none",
        ratio=1.0,
        bound=1e-5,
        threshold=None,
        variant="reference",
        columns=None,
    ):
        self.weights = {name: w.detach().double().clone() for name, w in weights.items()}
        self.first = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.second = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.settings = dict(locals())
        self.t = 0
        self.touched = self.clipped = 0
        self.largest_count = 0

    def __getattr__(self, name):
        return self.settings[name]

    def step(self, grads, counts, lr=None, frozen=()):
        """One step from dense gradients `[rows, dim]` and counts `[rows]` by table."""
        self.t += 1
        lr = self.lr if lr is None else lr
        moving = {n: w for n, w in self.weights.items() if n not in frozen}
        grads = {n: grads[n].double() + 2 * self.l2 * w for n, w in moving.items()}
        takes_part = {
            n: counts[n] > 0 if self.rows == "touched" else torch.ones_like(counts[n]) > 0
            for n in grads
        }
        clipped = self._clip(grads, counts, takes_part)
        for name, weights in moving.items():
            self.touched += int((counts[name] > 0).sum())
            self.clipped += int((clipped[name] & (counts[name] > 0)).sum())
            self.largest_count = max(self.largest_count, int(counts[name].max()))
            rows = takes_part[name]
            w, g = weights[rows], grads[name][rows]
            m, v = self.first[name][rows], self.second[name][rows]
            w = w * (1 - lr * self.weight_decay)
            w, m, v = self._move(w, g, m, v, lr)
            weights[rows], self.first[name][rows], self.second[name][rows] = w, m, v

    def _clip(self, grads, counts, takes_part):
        given = self.columns
        columns = given if isinstance(given, dict) else dict.fromkeys(grads, given)
        g = {n: grads[n][:, : columns[n]] for n in grads}
        w = {n: self.weights[n][:, : columns[n]] for n in grads}
        factor = {n: torch.ones(len(grads[n]), dtype=torch.float64) for n in grads}
        times = {n: counts[n].clamp_min(1).double() for n in grads}
        for name in grads:
            norms, width = g[name].norm(dim=1), g[name].shape[1]
            part = takes_part[name]
            if self.granularity == "cowclip":
                size = w[name].norm(dim=1)
                if self.variant == "reference":
                    floor = self.ratio * math.sqrt(width) * self.bound
                    limit = self.ratio * size.clamp_min(floor)
                else:
                    limit = (self.ratio * size).clamp_min(self.bound)
                factor[name] = limit * times[name] / norms.maximum(limit * times[name])
            elif self.granularity in ("row", "root_count"):
                power = 1.0 if self.granularity == "row" else 0.5
                limit = self.threshold * times[name] ** power
                factor[name] = limit / norms.maximum(limit)
            elif self.granularity == "field":
                norm = g[name][part].norm()
                factor[name][:] = min(1.0, self.threshold / float(norm.clamp_min(1e-300)))
            elif self.granularity == "field_adaptive":
                norm, size = g[name][part].norm(), w[name][part].norm()
                factor[name][:] = min(1.0, self.ratio * float(size / norm.clamp_min(1e-300)))
            elif self.granularity == "global":
                every = torch.cat([g[n][takes_part[n]].flatten() for n in grads]).norm()
                factor[name][:] = min(1.0, self.threshold / float(every.clamp_min(1e-300)))
        for name in grads:
            factor[name] = factor[name].nan_to_num(1.0)
            grads[name][:, : columns[name]] *= factor[name][:, None]
        return {name: factor[name] < 1 for name in grads}

    def _move(self, w, g, m, v, lr):
        if self.rule == "lion":
            b1, b2 = self.betas
            w = w - lr * torch.sign(b1 * m + (1 - b1) * g)
            return w, b2 * m + (1 - b2) * g, v
        if self.rule == "sgd":
            m = self.momentum * m + g
            return w - lr * m, m, v
        if self.rule in ("rowwise_adam", "rowwise_adagrad"):
            square = g.square()
            c = self.columns or g.shape[1]
            square[:, :c] = square[:, :c].mean(dim=1, keepdim=True)
            square[:, c:] = square[:, c:].sum(dim=1, keepdim=True)
        else:
            square = g * g
        if self.rule in ("adagrad", "rowwise_adagrad"):
            v = v + square
            return w - lr * g / (v.sqrt() + self.eps), m, v
        b1, b2 = self.betas
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * square
        if self.eps_placement == "keras":
            size = math.sqrt(1 - b2**self.t) / (1 - b1**self.t)
            return w - lr * size * m / (v.sqrt() + self.eps), m, v
        hat = (v / (1 - b2**self.t)).sqrt() + self.eps
        return w - lr * (m / (1 - b1**self.t)) / hat, m, v
