"""A model of two sharded tables and a dense layer, and its lookups."""

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from stampede.optim import CowClip, CowClipAdam, cowclip_sharders, local_cowclip_tables
from support.gathering import whole_tables

CPU = torch.device("cpu")
CLIP = {"ratio": 0.01, "bound": 1e-3}
SETTINGS = {"lr": 1e-2, "l2": 1e-3}


def tables(names="ab", kind=EmbeddingBagConfig):
    return [
        kind(name=name, num_embeddings=20, embedding_dim=8, feature_names=[f"f{name}"])
        for name in names
    ]


class Model(nn.Module):
    def __init__(self, weighted=False):
        super().__init__()
        self.tables = EmbeddingBagCollection(tables(), is_weighted=weighted)
        self.dense = nn.Linear(16, 1)

    def forward(self, features):
        return self.dense(self.tables(features).values()).squeeze(1)


def embeddings_of(model):
    return [p for name, p in model.named_parameters() if "embedding" in name]


def with_optimizer(model, **settings):
    settings = {**SETTINGS, "clip": CowClip(**CLIP), **settings}
    apply_optimizer_in_backward(CowClipAdam, embeddings_of(model), settings)
    return model


def shard(model, sharders=None, **settings):
    sharders = sharders or cowclip_sharders()
    model = with_optimizer(model, **settings)
    return DistributedModelParallel(model, device=CPU, sharders=sharders)


def features(seed=0, weights=None):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 4, (16,), generator=draw)
    ids = torch.randint(0, 12, (int(lengths.sum()),), generator=draw)
    if weights is not None:
        weights = weights(len(ids))
    return KeyedJaggedTensor(["fa", "fb"], ids, lengths=lengths, weights=weights)


def weights_of(model):
    return torch.cat([table.flatten() for table in whole_tables(model).values()])


def steps_of(model):
    """How many updates the tables had."""
    return [int(tables.step_count) for tables in local_cowclip_tables(model)]


def dense_optimizer(model):
    return torch.optim.SGD(model.module.dense.parameters(), lr=0.1)


def assert_trains(model):
    before = weights_of(model)
    model(features()).sum().backward()
    assert not torch.equal(weights_of(model), before)
