"""DeepFM as users of plain PyTorch write it: nn.Embedding, autograd, torch's optimizers.

It uses stampede's reader, so that only training differs. Each process makes one measurement and
prints a line of JSON.

    python benchmarks/peers/plain_pytorch.py FOLDER --batch 8192 --optimizer sparse_adam
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import accumulate, islice, pairwise
from pathlib import Path

import torch
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor, nn
from torch.nn import functional

from stampede.data import Batch, Dataset, GlobalBatches, Order
from stampede.data.prepared.reader import open_prepared

DIM = 10


class DeepFM(nn.Module):
    """All fields share one table, which is faster here than a table per field."""

    def __init__(
        self, sizes: list[int], numbers: int, hidden: list[int], sparse: bool, dropout: float
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sum(sizes), DIM, sparse=sparse)
        self.first_order = nn.Embedding(sum(sizes), 1, sparse=sparse)
        nn.init.normal_(self.embedding.weight, std=1e-2)
        nn.init.zeros_(self.first_order.weight)
        starts = torch.tensor([0, *accumulate(sizes)][:-1])
        self.register_buffer("starts", starts, persistent=False)
        layers: list[nn.Module] = []
        for before, after in pairwise([len(sizes) * DIM + numbers, *hidden]):
            layers += [nn.Linear(before, after), nn.ReLU()]
            if dropout:
                layers.append(nn.Dropout(dropout))
        self.mlp = nn.Sequential(*layers, nn.Linear(hidden[-1], 1))
        self.numbers = nn.Linear(numbers, 1)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        rows = ids + self.starts
        embedded = self.embedding(rows)
        total = embedded.sum(1)
        second_order = 0.5 * (total.square() - embedded.square().sum(1)).sum(1)
        deep = self.mlp(torch.cat([embedded.flatten(1), numbers], 1)).squeeze(1)
        first_order = self.first_order(rows).sum((1, 2)) + self.numbers(numbers).squeeze(1)
        return first_order + second_order + deep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--optimizer", choices=["sparse_adam", "dense_adam"], required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--steps", type=int, help="at most; default: all of the epochs")
    parser.add_argument("--hidden", type=int, nargs="*", default=[400, 400, 400])
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-4)
    evaluated = "print AUC and logloss of the test part after each epoch, with the seconds so far"
    parser.add_argument("--evaluate", action="store_true", help=evaluated)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dataset = open_prepared(arguments.folder)
    sizes = dataset.vocabulary_sizes
    sparse = arguments.optimizer == "sparse_adam"
    sizes_of = list(sizes.values()), dataset.numbers, arguments.hidden
    model = DeepFM(*sizes_of, sparse, arguments.dropout)
    tables = [model.embedding.weight, model.first_order.weight]
    kind = torch.optim.SparseAdam if sparse else torch.optim.Adam
    dense = [p for name, p in model.named_parameters() if "mlp" in name or "numbers" in name]
    optimizers = [kind(tables, lr=arguments.lr), torch.optim.Adam(dense, lr=arguments.lr)]
    order = Order(dataset.train.rows, "global", 0, 0)
    batches = GlobalBatches(dataset.train, list(sizes), arguments.batch, 0, 1, order)

    samples, seconds, evaluations, steps = 0, 0.0, [], arguments.steps
    for _ in range(arguments.epochs):
        start = time.perf_counter()
        for batch in islice(batches, steps):
            logits = model(*_inputs(batch))
            loss = functional.binary_cross_entropy_with_logits(logits, batch.label)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            samples += batch.samples
            steps = None if steps is None else steps - 1
        seconds += time.perf_counter() - start
        if arguments.evaluate:
            evaluations.append({"seconds": seconds, **_evaluated(model.eval(), dataset)})
            model.train()
    found = {"samples": samples, "seconds": seconds, "loss": loss.item()}
    print(json.dumps({**found, "evaluations": evaluations}))


def _inputs(batch: Batch) -> tuple[Tensor, Tensor]:
    return batch.sparse.values().view(len(batch.sparse.keys()), -1).t(), batch.dense


@torch.no_grad()
def _evaluated(model: DeepFM, dataset: Dataset) -> dict[str, float]:
    order = Order(dataset.test.rows, "none", 0, 0)
    batches = GlobalBatches(dataset.test, list(dataset.vocabulary_sizes), 8192, 0, 1, order)
    scored = [(model(*_inputs(batch)).sigmoid(), batch.label) for batch in batches]
    scores, labels = (torch.cat(values).numpy() for values in zip(*scored, strict=True))
    return {"auc": roc_auc_score(labels, scores), "logloss": log_loss(labels, scores)}


if __name__ == "__main__":
    main()
