"""FBGEMM's own optimizers in TorchRec's tables, against their formulas in float64."""

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CowClipDefinition,
    WeightDecayMode,
)
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from stampede.optim.baselines import BASELINES, baseline_optimizer
from support.fbgemm_baselines import (
    IDS_PER_SAMPLE,
    SAMPLES,
    Expected,
    batch,
    shard,
    tables,
    tables_on,
    train,
)


def follow(name, steps=6, dim=12, **settings):
    """A table and its expectation after some steps."""
    rule = baseline_optimizer(name, device_type="cpu", **settings)
    model = shard({"a": rule}, dim)
    before = tables(model)["a"].clone()
    expected = Expected(name, before, **settings)
    for _ in range(steps):
        ids, bags, rows = batch(dim)
        train(model, ids, bags)
        expected.step(rows, ids.flatten().tolist())
    after = tables(model)["a"]
    assert (after[:-2] != before[:-2]).any(1).sum() > 5
    assert torch.equal(after[-2:], before[-2:])
    return after, expected


@pytest.mark.parametrize("dim", [4, 8, 12])
@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_rowwise_adagrad_follows_its_formula(dim, eps):
    weights, expected = follow("fbgemm_rowwise_adagrad", dim=dim, lr=0.1, eps=eps)
    torch.testing.assert_close(weights.double(), expected.weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("decay", [{}, {"l2": 0.05}, {"weight_decay": 0.2}], ids=str)
@pytest.mark.parametrize("counter_halflife", [-1, 0])
@pytest.mark.parametrize("bounds", [(0.1, 0.0), (0.0, 0.05), (0.1, 0.05)], ids=str)
def test_fbgemms_cowclip_follows_its_formula(decay, counter_halflife, bounds):
    ratio, bound = bounds
    weights, expected = follow(
        "fbgemm_cowclip", lr=0.1, eps=1e-3, ratio=ratio, bound=bound,
        counter_halflife=counter_halflife, **decay,
    )  # fmt: skip
    assert expected.clipped > 3 and expected.kept > 3
    torch.testing.assert_close(weights.double(), expected.weights, rtol=1e-5, atol=1e-6)


def test_fbgemms_cowclip_counts_steps_not_occurrences():
    model = shard({"a": baseline_optimizer("fbgemm_cowclip", device_type="cpu", lr=0.1)})
    for _ in range(3):
        train(
            model, torch.ones(SAMPLES, IDS_PER_SAMPLE, dtype=torch.int64), torch.ones(SAMPLES, 12)
        )
    state = model.fused_optimizer.state_dict()["state"]["ebc.embedding_bags.a.weight"]
    assert state["a.row_counter"].local_shards()[0].tensor[:3].tolist() == [0.0, 3.0, 0.0]


def test_fbgemms_own_defaults_freeze_every_weight():
    """Why `baseline_optimizer` refuses ratio 0 with bound 0."""
    arguments = {
        "lr": 0.1,
        "weight_decay_mode": WeightDecayMode.COWCLIP,
        "cowclip_regularization": CowClipDefinition(),
    }
    model = shard({"a": (RowWiseAdagrad, arguments)})
    before = tables(model)["a"].clone()
    ids, bags, _ = batch(12)
    train(model, ids, bags)
    assert torch.equal(tables(model)["a"], before)


ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize(
    "device, name, decay",
    [("cpu", "fbgemm_rowwise_adagrad", {}), ("cpu", "fbgemm_cowclip", {"l2": 0.05})]
    + [
        pytest.param("cuda", name, decay, marks=ON_GPU)
        for name in BASELINES
        for decay in ({}, {"l2": 0.05}, {"weight_decay": 0.2})
        if not (name == "fbgemm_adam" and "l2" in decay)
    ],
)
def test_every_device_follows_the_same_formula(device, name, decay):
    settings = {"lr": 0.1, "eps": 1e-3, "ratio": 0.1, "bound": 0.05, **decay}
    tbe = tables_on(device, name, **settings)
    (weights,) = tbe.split_embedding_weights()
    weights.uniform_(-0.3, 0.3)
    expected = Expected(name, weights.cpu(), **settings)
    for _ in range(4):
        ids, bags, rows = batch(12)
        offsets = torch.arange(SAMPLES + 1) * IDS_PER_SAMPLE
        pooled = tbe(ids.flatten().to(device), offsets.to(device))
        pooled.backward(bags.to(device))
        expected.step(rows, ids.flatten().tolist())
    torch.testing.assert_close(weights.cpu().double(), expected.weights, rtol=1e-4, atol=1e-5)
