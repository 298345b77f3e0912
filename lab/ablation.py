"""The paper's ablation of its clip: DeepFM under six clips, in plain PyTorch on one process.

    python -m stampede.lab.ablation --batch 1024 8192            # synthetic clicks
    python -m stampede.lab.ablation PREPARED --epochs 10         # a folder of `stampede prepare`

A table for each field (`nn.Embedding`), dense gradients, float32; all rows take a step in each
batch, as in the authors' code. Embeddings are clipped, first-order weights are not. Settings are
the paper's, scaled by its rule. For large logs and several processes there is the launcher, with
the clips by row only (`configs/sweeps/clipping.yaml`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor, nn
from torch.nn import functional

from stampede.data import Batch, Dataset, GlobalBatches, Order, Part, SyntheticClicks, open_prepared
from stampede.models import NetworkShape, NoOptions, network
from stampede.optim import DenseAdam, Hyperparameters, Schedule, learning_rate, scale

Granularity = Literal["none", "global", "field", "row", "field_adaptive", "cowclip"]
# Of each constant threshold the best of four by test AUC, on a sample of Criteo at batch 8192.
THRESHOLDS = {"global": 1e-3, "field": 3e-4, "row": 1e-6}
CLIPS: tuple[Granularity, ...] = ("none", *THRESHOLDS, "field_adaptive", "cowclip")
_BASE = Hyperparameters(embedding_lr=1e-4, embedding_l2=1e-5, dense_lr=8e-4)
_BASE_BATCH_SIZE = 1024


@dataclass(frozen=True)
class Clip:
    """What is scaled down together, and to which norm.

    | granularity | what | largest norm |
    |---|---|---|
    | `none` | - | - |
    | `global` | the gradients of all tables | threshold |
    | `field` | the gradient of a table | threshold |
    | `row` | the gradient of a row | threshold * max(count, 1) |
    | `field_adaptive` | the gradient of a table | ratio * norm of its weights |
    | `cowclip` | the gradient of a row | ratio * max(norm, ratio*sqrt(D)*bound) * max(count, 1) |

    The count is how often an id occurs in the batch. Gradients include the L2 term.

    Attributes:
        threshold: of `global`, `field` and `row`.
        ratio, bound: of the adaptive clips, for `D` columns.
    """

    granularity: Granularity
    threshold: float | None = None
    ratio: float = 1.0
    bound: float = 1e-5

    def factors(
        self, grads: Sequence[Tensor], weights: Sequence[Tensor], counts: Sequence[Tensor]
    ) -> list[Tensor]:
        """What to multiply each table's gradient by: a scalar or `[rows, 1]`, at most 1.

        Args:
            grads, weights: of each table, `[rows, dim]`.
            counts: of each table, `[rows]` int64.
        """
        if self.granularity == "none":
            return [grad.new_ones(()) for grad in grads]
        if self.granularity == "global":
            norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
            return [_factor(norm, norm.new_tensor(self.threshold))] * len(grads)
        found = []
        for grad, weight, count in zip(grads, weights, counts, strict=True):
            if self.granularity == "field":
                norm, largest = grad.norm(), grad.new_tensor(self.threshold)
            elif self.granularity == "field_adaptive":
                norm, largest = grad.norm(), self.ratio * weight.norm()
            else:
                norm, times = grad.norm(dim=1, keepdim=True), count.clamp_min(1)[:, None]
                if self.granularity == "row":
                    largest = self.threshold * times.to(grad.dtype)
                else:
                    least = self.ratio * grad.shape[1] ** 0.5 * self.bound
                    size = weight.norm(dim=1, keepdim=True).clamp_min(least)
                    largest = self.ratio * size * times
            found.append(_factor(norm, largest))
        return found


def _factor(norm: Tensor, largest: Tensor) -> Tensor:
    # A zero norm with a zero threshold would divide 0 by 0.
    return (largest / norm).where(norm > largest, 1.0)


class DeepFM(nn.Module):
    """The network of `stampede.models` over a table for each field.

    Args:
        sizes: rows of each field's table.
        numbers: number of numeric inputs.
        std: of the initial embeddings; first-order weights begin at 0.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        numbers: int,
        dim: int = 10,
        hidden: tuple[int, ...] = (400, 400, 400),
        std: float = 1e-2,
        seed: int = 0,
    ) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        tables = (torch.empty(rows, dim).normal_(std=std, generator=draw) for rows in sizes)
        self.tables = nn.ModuleList(nn.Embedding.from_pretrained(t, freeze=False) for t in tables)
        first = (torch.zeros(rows, 1) for rows in sizes)
        self.first_order = nn.ModuleList(
            nn.Embedding.from_pretrained(t, freeze=False) for t in first
        )
        shape = NetworkShape(len(sizes), dim, numbers, hidden)
        self.network = network("deepfm").build(shape, draw, NoOptions())
        self.numbers = nn.Linear(numbers, 1)
        nn.init.xavier_normal_(self.numbers.weight, generator=draw)
        nn.init.zeros_(self.numbers.bias)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """Logits `[batch]` from ids `[fields, batch]` and numbers `[batch, n]`."""
        looked_up = torch.stack([t(i) for t, i in zip(self.tables, ids, strict=True)], 1)
        first = sum(t(i) for t, i in zip(self.first_order, ids, strict=True))
        return self.network(looked_up, numbers) + (first + self.numbers(numbers)).squeeze(1)


class Training:
    """DeepFM, its optimizer, and a step under a clip.

    Args:
        settings: rates and L2 at the actual batch size.
    """

    def __init__(self, model: DeepFM, clip: Clip, settings: Hyperparameters) -> None:
        self.model, self.clip, self.l2 = model, clip, settings.embedding_l2
        self.embeddings = [table.weight for table in model.tables]
        first = [table.weight for table in model.first_order]
        top = [model.numbers.bias, *model.network.parameters()]
        of_tables, self.dense = {"lr": settings.embedding_lr}, {"lr": settings.dense_lr}
        self.optimizer = DenseAdam(
            [
                # The L2 term of embeddings is clipped too, so `step` adds it.
                {"params": self.embeddings, **of_tables},
                {"params": first, "l2": self.l2, **of_tables},
                {"params": [model.numbers.weight], "l2": self.l2, **self.dense},
                {"params": top, **self.dense},
            ]
        )

    def step(self, ids: Tensor, numbers: Tensor, label: Tensor, warmed: float = 1.0) -> float:
        """One step; returns the mean loss of the batch.

        Args:
            ids, numbers: see `DeepFM.forward`.
            label: `[batch]` float32.
            warmed: factor of the dense layers' rate.
        """
        self.optimizer.zero_grad()
        loss = functional.binary_cross_entropy_with_logits(self.model(ids, numbers), label)
        loss.backward()
        with torch.no_grad():
            grads = [weight.grad.add_(weight, alpha=2 * self.l2) for weight in self.embeddings]
            counts = [
                torch.bincount(of_field, minlength=len(weight))
                for of_field, weight in zip(ids, self.embeddings, strict=True)
            ]
            torch._foreach_mul_(grads, self.clip.factors(grads, self.embeddings, counts))
        for group in self.optimizer.param_groups[2:]:
            group["lr"] = self.dense["lr"] * warmed
        self.optimizer.step()
        return loss.item()


def run(
    dataset: Dataset, clip: Clip, batch_size: int, epochs: int, seed: int = 0
) -> tuple[float, float]:
    """Test AUC and logloss after some epochs with the paper's settings."""
    model = DeepFM([*dataset.vocabulary_sizes.values()], dataset.numbers, seed=seed)
    settings = scale(_BASE, "cowclip", batch_size, _BASE_BATCH_SIZE).scaled
    training, schedule = Training(model, clip, settings), Schedule(warmup=1.0)
    order = Order(dataset.train.rows, "global" if dataset.shuffle else "rotate", seed)
    batches, step = _batches(dataset, dataset.train, batch_size, order), 0
    for _ in range(epochs):
        for batch in batches:
            rows = dataset.train.rows / batch_size
            warmed = learning_rate(schedule, 1.0, step, rows, epochs * len(batches))
            training.step(_ids(batch, len(model.tables)), batch.dense, batch.label, warmed)
            step += 1
    return evaluate(model, _batches(dataset, dataset.test, 8192))


@torch.no_grad()
def evaluate(model: DeepFM, batches: Iterable[Batch]) -> tuple[float, float]:
    """AUC and logloss."""
    fields = len(model.tables)
    scored = [(model(_ids(b, fields), b.dense).sigmoid().double(), b.label) for b in batches]
    scores, labels = (torch.cat(parts).numpy() for parts in zip(*scored, strict=True))
    return roc_auc_score(labels, scores), log_loss(labels, scores)


def _batches(dataset: Dataset, part: Part, size: int, order: Order | None = None) -> GlobalBatches:
    return GlobalBatches(part, [*dataset.vocabulary_sizes], size, 0, 1, order)


def _ids(batch: Batch, fields: int) -> Tensor:
    """`[fields, batch]`."""
    return batch.sparse.values().view(fields, -1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table of all clips."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("folder", type=Path, nargs="?", help="a prepared log; default: synthetic clicks")
    add("--rows", type=int, default=200_000, help="of synthetic clicks")
    add("--batch", type=int, nargs="+", default=[1024], help="batch sizes")
    add("--epochs", type=int, default=1)
    add("--seeds", type=int, default=1, help="number of them")
    add("--clips", nargs="+", choices=CLIPS, default=CLIPS)
    given = parser.parse_args(arguments)
    drawn = SyntheticClicks().dataset(given.rows, max(given.rows // 10, 1000))
    dataset = open_prepared(given.folder) if given.folder else drawn
    if dataset.multi or dataset.shared or dataset.has_weight:
        parser.error(
            f"{given.folder} has fields of several ids, shared tables, or sample weights; leave "
            "them out"
        )
    print("| clip | batch | test AUC | logloss |\n|---|---|---|---|")
    for name in given.clips:
        for size in given.batch:
            clip = Clip(name, THRESHOLDS.get(name))
            found = [run(dataset, clip, size, given.epochs, seed) for seed in range(given.seeds)]
            auc, loss = (statistics.mean(values) for values in zip(*found, strict=True))
            print(f"| `{name}` | {size} | {auc:.4f} | {loss:.4f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
