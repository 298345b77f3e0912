"""Settings of baselines: refused, or handed to FBGEMM."""

import inspect

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)

from stampede.optim.baselines import BASELINES, baseline_optimizer
from support.fbgemm_baselines import Expected, batch, shard, tables, tables_on, train


@pytest.mark.parametrize("decay", [{"l2": 0.05}, {"weight_decay": 0.2}], ids=str)
def test_rowwise_adagrads_decay_is_refused_where_fbgemm_ignores_it(decay):
    with pytest.raises(ValueError, match=r"on CPU FBGEMM ignores.*fbgemm_cowclip.*GPU"):
        baseline_optimizer("fbgemm_rowwise_adagrad", device_type="cpu", lr=0.1, **decay)
    # If this fails, FBGEMM's CPU kernel has learnt to decay: the refusal can go.
    name = "fbgemm_rowwise_adagrad"
    model = shard({"a": baseline_optimizer(name, device_type="cuda", lr=0.1, **decay)})
    expected = Expected(name, tables(model)["a"], lr=0.1)
    ids, bags, rows = batch(12)
    train(model, ids, bags)
    expected.step(rows, ids.flatten().tolist())
    torch.testing.assert_close(tables(model)["a"].double(), expected.weights, rtol=1e-5, atol=1e-6)


def test_adam_is_refused_on_cpu():
    with pytest.raises(ValueError, match="fbgemm_adam: FBGEMM has no Adam on CPU; choose Cow"):
        baseline_optimizer("fbgemm_adam", device_type="cpu", lr=0.1)
    with pytest.raises(AssertionError, match="not supported in CPU mode"):
        shard({"a": baseline_optimizer("fbgemm_adam", device_type="cuda", lr=0.1)})


def test_settings_for_a_gpu_reach_fbgemm():
    """Without a GPU: FBGEMM builds the tables, on `meta`, but cannot run them."""
    tbe = tables_on("meta", "fbgemm_adam", lr=0.1, eps=1e-5, betas=(0.8, 0.7), weight_decay=0.3)
    assert tbe.get_learning_rate() == pytest.approx(0.1)
    taken = tbe.optimizer_args
    assert (taken.eps, taken.beta1, taken.beta2, taken.weight_decay) == (1e-5, 0.8, 0.7, 0.3)
    assert [set(state) for state in tbe.get_optimizer_state()] == [{"exp_avg", "exp_avg_sq"}]

    for decay, mode in (({"l2": 0.1}, "L2"), ({"weight_decay": 0.2}, "DECOUPLE")):
        taken = tables_on("meta", "fbgemm_rowwise_adagrad", lr=0.1, **decay).optimizer_args
        assert (taken.weight_decay, taken.weight_decay_mode) == (0.2, WeightDecayMode[mode])


@pytest.mark.parametrize("name", BASELINES)
def test_the_arguments_are_fbgemms_new_and_hashable(name):
    first, second = (
        baseline_optimizer(name, device_type="cuda", lr=0.1, weight_decay=0.1)[1] for _ in range(2)
    )
    # TorchRec changes the dictionary, and groups tables by its values.
    assert first is not second
    assert hash(tuple(sorted(first.items()))) == hash(tuple(sorted(second.items())))
    taken = inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters
    assert set(first) - {"lr"} <= set(taken)


@pytest.mark.parametrize(
    "name, settings, words",
    [
        ("adam", {}, "'adam'.*fbgemm_rowwise_adagrad, fbgemm_adam, fbgemm_cowclip"),
        ("fbgemm_adam", {"device_type": "tpu"}, "'tpu'.*'cpu' or 'cuda'"),
        ("fbgemm_adam", {"lr": -1.0}, "lr is -1.0"),
        ("fbgemm_cowclip", {"l2": float("nan")}, "l2 is nan"),
        ("fbgemm_cowclip", {"eps": 0.0}, "eps is 0"),
        ("fbgemm_adam", {"l2": 0.1}, "only decoupled decay.*weight_decay"),
        ("fbgemm_adam", {"betas": (0.9, 1.0)}, "betas"),
        ("fbgemm_cowclip", {"l2": 0.1, "weight_decay": 0.1}, "one decay at a time"),
        ("fbgemm_cowclip", {"ratio": 0.0, "bound": 0.0}, "freezes every weight.*ratio=1"),
        ("fbgemm_cowclip", {"bound": -1.0}, "bound is -1.0"),
        ("fbgemm_cowclip", {"counter_halflife": 100}, "counter_halflife is 100.*-1.*0"),
    ],
)
def test_settings_out_of_range_are_refused(name, settings, words):
    with pytest.raises(ValueError, match=words):
        baseline_optimizer(name, **{"device_type": "cuda", "lr": 0.1, **settings})
