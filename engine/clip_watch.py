"""Which rows a step clips: by field, and by how often their id occurs in the batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stampede.data import Batch
from stampede.engine.training_run import TrainingRun
from stampede.optim.clip import row_threshold

_ABSENT, _SEVERAL = -1, -2

# Means over rows whose ids occur about equally often in a batch, in `metrics.jsonl`.
NORMS = ("gradient_norm", "weight_norm", "threshold")


class ClipWatch:
    """Counts clipped rows of single steps, and averages norms by how frequent rows are.

    A sample's embedding of a field with one id is the row of that id, and the row's gradient is the
    sum of its samples' gradients. So neither the tables nor their update are touched. Fields with
    several ids in a sample are left out, as their embeddings are sums of rows.

    Args:
        run: with a clip by row if `train.clip_stats_every` is set; all its ranks must watch the
            same steps.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._every = run.config.train.clip_stats_every
        self._dim = run.config.model.dim
        clip = getattr(run.config.optim.embedding, "clip", None)
        self._clip = clip and clip.as_clip(self._dim)
        self._l2 = run.job.scaling.scaled.embedding_l2
        self._front = run.job.front
        self._processes = run.processes
        self._found: dict[str, Any] | None = None

    def watches(self, step: int) -> bool:
        """Whether to watch a step, counted from 1."""
        return self._every > 0 and step % self._every == 0

    def __call__(self, batch: Batch, rows: Tensor, grad: Tensor) -> None:
        """Count a step's rows before it updates the tables; all ranks must call it.

        Args:
            grad: of the looked-up rows, still to be averaged over the ranks.
        """
        embeddings, _ = self._front.split(rows)
        grads, _ = self._front.split(grad)
        fields, left_out = {}, []
        by_count: dict[int, list[float]] = {}
        for index, field in enumerate(self._front.fields):
            # Field by field, so that rank 0 holds only one field of the global batch at a time.
            ids = self._gathered(_one_id(batch, field))
            values = self._gathered(torch.cat([embeddings[:, index], grads[:, index]], 1))
            if ids is None:
                continue
            if (ids == _SEVERAL).any():
                left_out.append(field)
                continue
            found = self._rows(ids, values)
            fields[field] = {"touched": found.shape[1], "clipped": int(found[1].sum())}
            for power, sums in _by_power(found).items():
                total = by_count.setdefault(power, [0.0] * len(sums))
                by_count[power] = [a + b for a, b in zip(total, sums, strict=True)]
        self._found = {
            "fields": fields,
            "counts": [
                {"from": 2**power, "touched": int(touched), "clipped": int(clipped)}
                | {name: of_all / touched for name, of_all in zip(NORMS, norms, strict=True)}
                for power, (touched, clipped, *norms) in sorted(by_count.items())
            ],
            "left_out": left_out,
        }

    def take(self) -> dict[str, Any] | None:
        """The counts since the last call, complete on rank 0: `fields`, `counts`, `left_out`.

        `counts` groups the rows of all fields by the occurrences of their ids in the global batch:
        `from` a power of two up to the next. It also has the means over these rows of the
        gradient's norm, L2 term included, of the weights' norm, and of the threshold.
        """
        found, self._found = self._found, None
        return found

    def _rows(self, ids: Tensor, values: Tensor) -> Tensor:
        """`[5, n]` float64 of distinct ids: occurrences, whether clipped, and `NORMS`."""
        kept = ids != _ABSENT
        distinct, place, counts = ids[kept].unique(return_inverse=True, return_counts=True)
        weights, grads = values[kept].double().split(self._dim, 1)
        summed = weights.new_zeros(len(distinct), self._dim).index_add_(0, place, grads)
        row = torch.empty_like(summed).index_copy_(0, place, weights)
        summed = summed / self._processes.world_size + 2 * self._l2 * row
        norm, weight_norm = summed.norm(dim=1), row.norm(dim=1)
        threshold = row_threshold(weight_norm, counts, self._dim, self._clip)
        return torch.stack(
            [counts.double(), (norm > threshold).double(), norm, weight_norm, threshold]
        )

    def _gathered(self, local: Tensor) -> Tensor | None:
        """`[n, ...]` of all ranks, whose parts are padded to one size, on rank 0's CPU."""
        local = local.detach().cpu().contiguous()
        received = None
        if self._processes.is_main:
            received = [torch.empty_like(local) for _ in range(self._processes.world_size)]
        dist.gather(local, received)
        return None if received is None else torch.cat(received)


def _one_id(batch: Batch, field: str) -> Tensor:
    """The id of each sample, `[n]` int64; all are `_SEVERAL` if one sample has several."""
    jagged = batch.sparse[field]
    lengths, values = jagged.lengths().cpu(), jagged.values().cpu()
    if (lengths > 1).any():
        return torch.full((len(lengths),), _SEVERAL)
    ids = torch.full((len(lengths),), _ABSENT)
    ids[lengths == 1] = values.long()
    return ids


def _by_power(rows: Tensor) -> dict[int, list[float]]:
    """Number of rows and sums of the other values, by the integer part of the counts' log2."""
    # The exponent of a float is exact where a logarithm is rounded.
    powers = torch.frexp(rows[0]).exponent.long() - 1
    touched = powers.bincount()
    sums = torch.stack([touched.double(), *(powers.bincount(of) for of in rows[1:])])
    return {power: sums[:, power].tolist() for power in touched.nonzero().flatten().tolist()}
