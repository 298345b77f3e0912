"""Lookups are counted right or refused."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.embedding import set_ec_index_dedup
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from stampede.optim import (
    local_cowclip_tables,
)
from support.two_tables import (
    CLIP,
    SETTINGS,
    Model,
    assert_trains,
    dense_optimizer,
    features,
    shard,
    tables,
    weights_of,
)
from support.unsharded import Unsharded, relative_deviation, whole_tables


def test_two_lookups_of_one_forward_add_their_counts():
    torch.manual_seed(0)
    model = Model()
    reference, once = (
        Unsharded(model, 0.1, granularity="cowclip", **options, **CLIP, **SETTINGS)
        for options in ({}, {"force_counts": 1})
    )
    model = shard(model)
    start = whole_tables(model)
    dense = dense_optimizer(model)

    for unsharded in (reference, once):
        unsharded.copy_tables(start)
    for step in range(5):

        def loss_of(model, step=step):
            first, second = (model(features(seed)) for seed in (2 * step, 2 * step + 1))
            return (first.sigmoid() * second).sum() * 10

        dense.zero_grad()
        loss_of(model).backward()
        dense.step()
        reference.step(loss_of)
        once.step(loss_of)
    found = whole_tables(model)
    assert relative_deviation(found, reference.weights, start) < 1e-4
    assert relative_deviation(found, once.weights, start) > 1e-2
    assert [int(t.step_count) for t in local_cowclip_tables(model)] == [5]


def test_variable_batch_sizes_are_refused():
    model = shard(Model())
    jagged = KeyedJaggedTensor(
        keys=["fa", "fb"],
        values=torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=(["fa", "fb"], torch.tensor([[0, 1], [0, 0]])),
    )
    with pytest.raises(ValueError, match="variable batch size per feature"):
        model(jagged)
    assert_trains(model)


def test_ids_of_every_kind_are_accepted():
    model, wanted = shard(Model()), shard(Model())
    wanted.load_state_dict(model.state_dict())
    ids, lengths = torch.tensor([1, 2, 2, 3, 4, 4]), torch.tensor([2, 1, 1, 2])
    wanted(KeyedJaggedTensor(["fa", "fb"], ids, lengths=lengths)).sum().backward()
    jagged = torch.nested.nested_tensor_from_jagged
    for accepted in (
        KeyedJaggedTensor(["fa", "fb"], ids.int(), lengths=lengths.int()),
        KeyedJaggedTensor(["fx", "fb", "fa"], ids.repeat(2)[[0, *range(3, 9)]],
                          lengths=torch.tensor([0, 1, 1, 2, 2, 1])),
        TensorDict({"fa": jagged(ids[:3], lengths=lengths[:2]),
                    "fb": jagged(ids[3:], lengths=lengths[2:])}),
    ):  # fmt: skip
        fresh = shard(Model())
        fresh.load_state_dict(model.state_dict())
        fresh(accepted).sum().backward()
        assert torch.equal(weights_of(fresh), weights_of(wanted))


@pytest.mark.parametrize("samples", [0, 2])
def test_a_batch_without_ids_is_a_step(samples):
    model = shard(Model(), l2=0.0)
    before = weights_of(model)
    none = torch.zeros(0, dtype=torch.int64)
    empty = KeyedJaggedTensor(["fa", "fb"], none, lengths=none.new_zeros(2 * samples))
    model(empty).sum().backward()
    assert torch.equal(weights_of(model), before)
    assert [int(tables.step_count) for tables in local_cowclip_tables(model)] == [1]


def test_learnable_weights_of_samples_are_refused():
    model = shard(Model(weighted=True))
    with pytest.raises(ValueError, match=r"per-sample weights get no gradient.*detach"):
        model(features(weights=lambda n: torch.ones(n, requires_grad=True)))
    model(features(weights=torch.ones)).sum().backward()


def test_feature_processors_under_torchrecs_own_sharder_are_refused():
    model = nn.Sequential(
        FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(tables(), is_weighted=True),
            PositionWeightedModuleCollection({"fa": 5, "fb": 5}),
        )
    )
    with pytest.raises(ValueError, match=r"CowClipAdam.*ebc_sharder=cowclip_sharders\(\)\[0\]"):
        shard(model, [FeatureProcessedEmbeddingBagCollectionSharder()])


def test_index_deduplication_is_refused():
    model = nn.Sequential(EmbeddingCollection(tables(kind=EmbeddingConfig)))
    set_ec_index_dedup(True)
    try:
        with pytest.raises(ValueError, match=r"falsifies their counts.*set_ec_index_dedup\(False"):
            shard(model)
    finally:
        set_ec_index_dedup(False)
