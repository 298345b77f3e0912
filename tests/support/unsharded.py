"""A model as it was before sharding, in plain float64 PyTorch, on tables with their counts."""

import copy

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedTensor, PoolingType
from torchrec.sparse.jagged_tensor import JaggedTensor

from support.reference import ReferenceTables


class PlainCollection(nn.Module):
    """What TorchRec's two unsharded collections compute, without rounding to float32.

    Attributes:
        counts: by table, how often each row was looked up; whoever reads it resets it.
    """

    def __init__(self, collection):
        super().__init__()
        self.pooled = isinstance(collection, EmbeddingBagCollection)
        self.configs = (
            collection.embedding_bag_configs() if self.pooled else collection.embedding_configs()
        )
        modules = collection.embedding_bags if self.pooled else collection.embeddings
        self.weighted = self.pooled and collection.is_weighted()
        self.tables = nn.ParameterDict(
            {name: module.weight.detach().double() for name, module in modules.items()}
        )
        self.counts = {name: torch.zeros(len(w), dtype=int) for name, w in self.tables.items()}

    def forward(self, features):
        names, outputs = [], []
        features = features.to_dict()
        uses = [feature for config in self.configs for feature in config.feature_names]
        for config in self.configs:
            for feature in config.feature_names:
                entry = features[feature]
                ids, lengths = entry.values().long(), entry.lengths()
                self.counts[config.name] += torch.bincount(ids, minlength=config.num_embeddings)
                rows = self.tables[config.name][ids]
                shared = uses.count(feature) > 1
                names.append(f"{feature}@{config.name}" if shared else feature)
                if not self.pooled:
                    # FBGEMM's operators on sequences know no float64.
                    outputs.append(JaggedTensor(values=rows.float(), lengths=lengths))
                    continue
                if self.weighted:
                    rows = rows * entry.weights().double()[:, None]
                bags = torch.arange(len(lengths)).repeat_interleave(lengths)
                pooled = rows.new_zeros(len(lengths), config.embedding_dim)
                pooled = pooled.index_add(0, bags, rows)
                if config.pooling == PoolingType.MEAN:
                    pooled = pooled / lengths.clamp_min(1)[:, None]
                outputs.append(pooled)
        if not self.pooled:
            return dict(zip(names, outputs, strict=True))
        widths = [output.shape[1] for output in outputs]
        return KeyedTensor(names, widths, torch.cat(outputs, dim=1))


class Unsharded:
    """Trains a float64 copy of a model: its tables by `ReferenceTables`, the rest by torch.

    Args:
        model: with weights on the CPU, before it is sharded.
        dense_lr: learning rate of everything but tables.
        dense: torch's optimizer of it.
        force_counts: as if every row of a batch had occurred so often (for negative tests).
        **settings: of `ReferenceTables`.
    """

    def __init__(self, model, dense_lr, force_counts=None, dense=torch.optim.SGD, **settings):
        model = copy.deepcopy(model)
        self.parts = {}
        for path, module in list(model.named_modules()):
            if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
                kind = "embedding_bags" if hasattr(module, "embedding_bags") else "embeddings"
                plain = PlainCollection(module)
                self.parts |= {f"{path}.{kind}.{n}.weight": (plain, n) for n in plain.tables}
                parent, _, name = path.rpartition(".")
                setattr(model.get_submodule(parent), name, plain)
        self.model = model.double()
        self.force_counts = force_counts
        self.reference = ReferenceTables(self.parameters(), **settings)
        tables = {id(table) for table in self.parameters().values()}
        others = [p for p in model.parameters() if id(p) not in tables]
        self.dense = dense(others, lr=dense_lr) if others else None

    def parameters(self):
        """The tables by path."""
        return {path: plain.tables[name] for path, (plain, name) in self.parts.items()}

    @property
    def weights(self):
        return self.reference.weights

    @torch.no_grad()
    def copy_tables(self, whole):
        """Take over the tables of a sharded model, by path."""
        for path, weights in self.weights.items():
            weights.copy_(whole[path])

    def step(self, loss_of):
        """One step; `loss_of(model)` is the loss of the global batch, which is returned."""
        parameters = self.parameters()
        with torch.no_grad():
            for path, parameter in parameters.items():
                parameter.copy_(self.weights[path])
        self.model.zero_grad()
        for plain, name in self.parts.values():
            plain.counts[name].zero_()
        loss = loss_of(self.model)
        loss.backward()
        counts = {path: plain.counts[name] for path, (plain, name) in self.parts.items()}
        if self.force_counts is not None:
            counts = {path: (c > 0) * self.force_counts for path, c in counts.items()}
        self.reference.step({path: p.grad for path, p in parameters.items()}, counts)
        if self.dense is not None:
            self.dense.step()
        return float(loss.detach())


def relative_deviation(found, expected, start):
    """Largest difference of any weight, relative to the largest movement of its table."""
    worst = 0.0
    for path, target in expected.items():
        movement = float((target - start[path].double()).abs().max())
        worst = max(worst, float((found[path].double() - target).abs().max()) / movement)
    return worst
