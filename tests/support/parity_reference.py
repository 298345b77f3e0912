"""The training of `parity` in plain float64 PyTorch, and how far another one is from it."""

import math

import torch

from support.parity import DEFAULTS, example_loss, global_batch
from support.reference import ReferenceTables


def train_reference(case, start, meanwhile=None, gradient_factor=1, **changes):
    """The same in float64; `changes` make it another rule, for negative tests.

    Args:
        meanwhile: called with the tables and the number of each step, after it.
        gradient_factor: what all gradients are multiplied by.
    """
    settings = {**DEFAULTS, **case.arguments, "rule": case.rule, **changes}
    force_counts = settings.pop("force_counts", None)
    settings.pop("on_nonfinite", None)
    if case.rule not in ("adam", "rowwise_adam"):
        settings.setdefault("eps", 1e-8)
    tables = ReferenceTables(start, **settings)
    for step in range(1, case.steps + 1):
        batch = global_batch(case, step)
        weights = {n: w.clone().requires_grad_() for n, w in tables.weights.items()}
        counts = {n: torch.zeros(len(w), dtype=torch.int64) for n, w in weights.items()}
        loss = torch.zeros((), dtype=torch.float64)
        for name, spec in zip(case.names, case.tables, strict=True):
            for feature in case.features[name]:
                ids, lengths, scales, targets = batch[feature]
                counts[name] += torch.bincount(ids, minlength=spec.rows)
                rows = weights[name][ids]
                bags = torch.arange(case.batch).repeat_interleave(lengths)
                if case.sequence:
                    loss = loss + example_loss(rows, targets[bags])
                    continue
                if case.weighted:
                    rows = rows * scales.double()[:, None]
                pooled = torch.zeros(case.batch, spec.dim, dtype=torch.float64)
                pooled = pooled.index_add(0, bags, rows)
                if spec.mean:
                    pooled = pooled / lengths.clamp_min(1)[:, None]
                loss = loss + example_loss(pooled, targets)
        loss = loss * gradient_factor / case.batch
        grads = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        grads = {
            n: torch.zeros_like(w) if g is None else g
            for (n, w), g in zip(weights.items(), grads, strict=True)
        }
        if force_counts is not None:
            counts = {n: (c > 0) * force_counts for n, c in counts.items()}
        tables.step(grads, counts)
        if meanwhile is not None:
            meanwhile(tables, step)
    return tables


def deviation(case, start, weights, reference):
    """Largest difference of any weight, relative to the largest movement."""
    movement = max(float((reference.weights[n] - start[n].double()).abs().max()) for n in start)
    worst = max(float((weights[n].double() - reference.weights[n]).abs().max()) for n in start)
    return worst / movement if math.isfinite(worst) else math.inf


def state_deviation(case, states, reference):
    """Largest difference of any state, each relative to the largest value of its kind."""
    worst = 0.0
    second = {"adam": "exp_avg_sq", "rowwise_adam": "exp_avg_sq"}.get(case.rule)
    pairs = []
    if case.rule in ("adam", "rowwise_adam") or case.arguments.get("momentum"):
        pairs.append(("momentum1", reference.first))
    if second is not None:
        pairs.append((second, reference.second))
    if case.rule in ("adagrad", "rowwise_adagrad"):
        pairs.append(("momentum1", reference.second))
    for key, expected in pairs:
        largest = max(float(value.abs().max()) for value in expected.values())
        for name in case.names:
            got = states[name][key].double()
            target = expected[name] if got.ndim == 2 else expected[name][:, 0]
            worst = max(worst, float((got - target).abs().max()) / largest)
    return worst
