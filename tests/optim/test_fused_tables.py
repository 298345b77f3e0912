"""Tables updated in the backward of FBGEMM's lookup, against float64 plain PyTorch."""

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from stampede.optim import CowClip, CowClipTables
from stampede.optim.update import UpdateSettings
from support.reference import ReferenceTable

RULE = UpdateSettings(l2=1e-4, clip=CowClip(ratio=0.5, bound=1e-3))


def make_tables(rows, dim, features, pooling, rule, lr=1e-2):
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(n, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for n in rows],
        feature_table_map=features,
        pooling_mode=pooling,
        device=torch.device("cpu"),
        learning_rate=lr,
    )
    return CowClipTables.adopt(tbe, rule)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    dim=st.sampled_from([4, 8]),
    shared=st.booleans(),
    mean=st.booleans(),
    weighted=st.booleans(),
    batch=st.integers(1, 4),
    keep=st.sampled_from(["all", "touched"]),
    seed=st.integers(0, 2**31),
)
def test_follows_the_equations(rows, dim, shared, mean, weighted, batch, keep, seed):
    draw = torch.Generator().manual_seed(seed)
    features = list(range(len(rows)))
    if shared:
        features.append(features[-1])
    rule = UpdateSettings(l2=1e-4, clip=RULE.clip, rows=keep)
    pooling = PoolingMode.MEAN if mean else PoolingMode.SUM
    tables = make_tables(rows, dim, features, pooling, rule)
    references = []
    for weights in tables.split_embedding_weights():
        scale = 10.0 ** -torch.randint(0, 3, (len(weights), 1), generator=draw)
        weights.copy_(torch.randn(weights.shape, generator=draw) * scale)
        references.append(ReferenceTable(weights))
    for step in range(1, 4):
        # Bags of 0 to 3 ids; ids repeat within and across bags.
        lengths = torch.randint(0, 4, (len(features) * batch,), generator=draw)
        indices = torch.cat(
            [torch.randint(0, rows[features[i // batch]], (n,), generator=draw)
             for i, n in enumerate(lengths.tolist())]
        )  # fmt: skip
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        factors = torch.rand(len(indices), generator=draw) if weighted else None
        upstream = torch.randn(batch, len(features) * dim, generator=draw)
        output = tables(indices, offsets, factors)
        output.backward(upstream)

        grads = [torch.zeros_like(r.weights) for r in references]
        counts = [torch.zeros(len(r.weights), dtype=torch.int64) for r in references]
        expected = torch.zeros(batch, len(features) * dim, dtype=torch.float64)
        for bag, length in enumerate(lengths.tolist()):
            feature, sample = divmod(bag, batch)
            table, columns = features[feature], slice(feature * dim, (feature + 1) * dim)
            for i in range(int(offsets[bag]), int(offsets[bag + 1])):
                factor = (1.0 if factors is None else float(factors[i])) / (length if mean else 1)
                expected[sample, columns] += factor * references[table].weights[indices[i]]
                grads[table][indices[i]] += factor * upstream[sample, columns]
                counts[table][indices[i]] += 1
        torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)
        for reference, grad, count in zip(references, grads, counts, strict=True):
            reference.step(grad, count, step, lr=1e-2, l2=1e-4, ratio=0.5, bound=1e-3, rows=keep)
    states = tables.get_optimizer_state()
    for weights, state, reference in zip(
        tables.split_embedding_weights(), states, references, strict=True
    ):
        torch.testing.assert_close(weights.double(), reference.weights, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state["momentum1"].double(), reference.m, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(state["exp_avg_sq"].double(), reference.v, rtol=1e-4, atol=1e-6)


def test_a_batch_without_ids_still_decays_all_rows():
    tables = make_tables([5], 4, [0], PoolingMode.SUM, UpdateSettings(l2=1e-2))
    before = tables.table.weights.clone().fill_(1.0)
    tables.table.weights.fill_(1.0)
    empty = torch.zeros(0, dtype=torch.int64)
    tables(empty, torch.zeros(3, dtype=torch.int64)).backward(torch.ones(2, 4))
    assert int(tables.step_count) == 1
    assert (tables.table.weights < before).all()


def test_learning_rate_changes_reach_the_update():
    tables = make_tables([5], 4, [0], PoolingMode.SUM, RULE, lr=0.5)
    tables.set_learning_rate(0.0)
    before = tables.table.weights.clone()
    tables(torch.tensor([1]), torch.tensor([0, 1])).backward(torch.ones(1, 4))
    assert torch.equal(tables.table.weights, before)


def test_no_update_without_backward():
    tables = make_tables([5], 4, [0], PoolingMode.SUM, RULE)
    before = tables.table.weights.clone()
    tables(torch.tensor([1]), torch.tensor([0, 1]))
    with torch.no_grad():
        assert not tables(torch.tensor([1]), torch.tensor([0, 1])).requires_grad
    assert torch.equal(tables.table.weights, before)


def test_learnable_per_sample_weights_are_refused():
    tables = make_tables([5], 4, [0], PoolingMode.SUM, RULE)
    with pytest.raises(ValueError, match="detach"):
        tables(torch.tensor([1]), torch.tensor([0, 1]), torch.ones(1, requires_grad=True))


def test_variable_batch_sizes_are_refused():
    tables = make_tables([5], 4, [0], PoolingMode.SUM, RULE)
    with pytest.raises(ValueError, match="variable batch size"):
        tables(torch.tensor([1]), torch.tensor([0, 1]), batch_size_per_feature_per_rank=[[1]])
