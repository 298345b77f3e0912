"""Which rows a step clips: by field, and by how often their id occurs in the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stampede.data import Batch
from stampede.engine.training.training_run import TrainingRun

_ABSENT, _SEVERAL = -1, -2

# Means over rows whose ids occur about equally often in a batch, in `metrics.jsonl`.
NORMS = ("gradient_norm", "weight_norm", "threshold")


def clip_statistics(run: TrainingRun, batch: Batch, rows: Tensor, grad: Tensor) -> dict[str, Any]:
    """Count the rows that a step with a clip by row clips; all ranks must call it.

    A sample's embedding of a field with one id is the row of that id, and the row's gradient is the
    sum of its samples' gradients. So neither the tables nor their update are touched. Tables of
    which a field has several ids in a sample, or weights of ids, are left out, as its embeddings
    are no rows; frozen ones have nothing to clip.

    Args:
        rows: looked up for the batch, before their update.
        grad: of the rows, still to be averaged over the ranks.

    Returns:
        `fields`, `counts` and `left_out`, complete on rank 0. `counts` groups the rows of all
        fields by the occurrences of their ids in the global batch: `from` a power of two up to the
        next. Its `gradient_norm` includes the L2 term.
    """
    front, processes = run.job.front, run.processes
    fields, left_out = {}, []
    by_count: dict[int, Tensor] = {}
    for field, sharing in front.tables.items():
        if field in run.config.model.frozen:
            continue
        if front.has_rows_apart(field) or not set(front.weighted).isdisjoint(sharing):
            left_out += sharing
            continue
        # Table by table, so that rank 0 holds only one table's part of the global batch at a time.
        dim = front.columns_of(field).dim
        clip = run.config.optim.embedding.clip.built(columns=dim)
        ids = processes.gather(torch.cat([_one_id(batch, one) for one in sharing]))
        looked_up = [
            torch.cat([front.of_field(given, one)[:, :dim] for given in (rows, grad)], 1)
            for one in sharing
        ]
        values = processes.gather(torch.cat(looked_up))
        if ids is None:
            continue
        ids, values = torch.cat(ids), torch.cat(values)
        if (ids == _SEVERAL).any():
            left_out += sharing
            continue
        kept = ids != _ABSENT
        distinct, place, counts = ids[kept].unique(return_inverse=True, return_counts=True)
        weights, of_samples = values[kept].double().split(dim, 1)
        row = weights.new_empty(len(distinct), dim).index_copy_(0, place, weights)
        summed = torch.zeros_like(row).index_add_(0, place, of_samples)
        gradient = summed / processes.world_size + 2 * run.job.scaling.scaled.embedding_l2 * row
        norm, weight_norm = gradient.norm(dim=1), row.norm(dim=1)
        threshold = clip.largest_norm(weight_norm, counts, dim)
        clipped = norm > threshold
        fields[field] = {"touched": len(distinct), "clipped": int(clipped.sum())}
        # The exponent of a float is exact where a logarithm is rounded.
        powers = torch.frexp(counts.double()).exponent.long() - 1
        each = (torch.ones_like(norm), clipped.double(), norm, weight_norm, threshold)
        sums = torch.stack([powers.bincount(values) for values in each], 1)
        for power in powers.unique().tolist():
            by_count[power] = by_count.get(power, 0.0) + sums[power]
    counts = []
    for power, sums in sorted(by_count.items()):
        touched, clipped, *norms = sums.tolist()
        means = {name: of_all / touched for name, of_all in zip(NORMS, norms, strict=True)}
        counts.append({"from": 2**power, "touched": int(touched), "clipped": int(clipped)} | means)
    return {"fields": fields, "counts": counts, "left_out": left_out}


def _one_id(batch: Batch, field: str) -> Tensor:
    """The id of each sample, `[n]` int64; all are `_SEVERAL` if one sample has several."""
    jagged = batch.sparse[field]
    lengths, values = jagged.lengths().cpu(), jagged.values().cpu()
    if (lengths > 1).any():
        return torch.full((len(lengths),), _SEVERAL)
    ids = torch.full((len(lengths),), _ABSENT)
    ids[lengths == 1] = values.long()
    return ids
