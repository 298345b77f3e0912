"""FBGEMM's own optimizers as baselines: settings, formulas, training."""

import math

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from fbgemm_optimizers import baseline_optimizer
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from support.bags import Bags, jagged, shard, weights_of
from support.ranks import process_group

ROWS, SAMPLES, IDS_PER_SAMPLE = 20, 6, 3


@pytest.fixture(scope="module", autouse=True)
def _group():
    with process_group():
        torch.manual_seed(0)
        yield


def on_meta(name, **settings):
    """A table with a baseline for a GPU; FBGEMM builds it on `meta`, but cannot run it."""
    optimizer, arguments = baseline_optimizer(name, device_type="cuda", **settings)
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, 12, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)],
        device=torch.device("meta"),
        optimizer=optimizer_type_to_emb_opt_type(optimizer),
        learning_rate=arguments.pop("lr"),
        **arguments,
    )


def test_settings_for_a_gpu_reach_fbgemm():
    tbe = on_meta("fbgemm_adam", lr=0.1, eps=1e-5, betas=(0.8, 0.7), weight_decay=0.3)
    assert tbe.get_learning_rate() == pytest.approx(0.1)
    taken = tbe.optimizer_args
    assert (taken.eps, taken.beta1, taken.beta2, taken.weight_decay) == (1e-5, 0.8, 0.7, 0.3)
    assert [set(state) for state in tbe.get_optimizer_state()] == [{"exp_avg", "exp_avg_sq"}]

    for decay, mode in (({"l2": 0.1}, "L2"), ({"weight_decay": 0.2}, "DECOUPLE")):
        taken = on_meta("fbgemm_rowwise_adagrad", lr=0.1, **decay).optimizer_args
        assert (taken.weight_decay, taken.weight_decay_mode) == (0.2, WeightDecayMode[mode])


@pytest.mark.parametrize(
    "name, device, settings, words",
    [
        ("fbgemm_adam", "cpu", {}, "fbgemm_adam: FBGEMM has no Adam on CPU; choose Cow"),
        ("fbgemm_rowwise_adagrad", "cpu", {"l2": 0.05}, "silently ignores.*fbgemm_cowclip.*GPU"),
        ("fbgemm_rowwise_adagrad", "cpu", {"weight_decay": 0.2}, "silently ignores.*cowclip.*GPU"),
        ("fbgemm_cowclip", "cuda", {"l2": 0.1, "weight_decay": 0.1}, "one decay at a time"),
        ("fbgemm_cowclip", "cuda", {"ratio": 0.0, "bound": 0.0}, "freezes every weight.*ratio=1"),
    ],
)
def test_settings_that_fbgemm_cannot_follow_are_refused(name, device, settings, words):
    with pytest.raises(ValueError, match=words):
        baseline_optimizer(name, device_type=device, lr=0.1, **settings)


def follow(name, *, lr, l2=0.0, weight_decay=0.0, eps=1e-8, dim=12, **clip):
    """A table after some steps, the same in float64, and how often its rows were clipped or not.

    Moved as the docstring of `baseline_optimizer` says.
    """
    decay = {key: x for key, x in (("l2", l2), ("weight_decay", weight_decay)) if x}
    rule = baseline_optimizer(name, device_type="cpu", lr=lr, eps=eps, **decay, **clip)
    model = Bags(a=dim)
    apply_optimizer_in_backward(rule[0], model.ebc.parameters(), rule[1])
    model = shard(model)
    before = weights_of(model)["a"]
    expected, sums, seen = before.double(), *torch.zeros(2, ROWS, dtype=torch.float64)
    clipped = {True: 0, False: 0}
    for _ in range(6):
        ids = torch.randint(0, ROWS - 2, (SAMPLES, IDS_PER_SAMPLE))
        # Rows of very different gradient, so that some are clipped and some are not.
        bags = 0.2 * torch.randn(SAMPLES, dim) * 10.0 ** torch.randint(-3, 1, (SAMPLES, 1))
        grad = torch.zeros(ROWS, dim, dtype=torch.float64)
        grad.index_add_(0, ids.flatten(), bags.double().repeat_interleave(IDS_PER_SAMPLE, 0))
        (model(jagged(["f_a"], ids))["f_a"] * bags).sum().backward()
        for i in ids.unique().tolist():
            w, g = expected[i].clone(), grad[i] + 2 * l2 * expected[i]
            sums[i] += float(g @ g) / dim
            change = lr / (math.sqrt(sums[i]) + eps) * g
            if name == "fbgemm_cowclip":
                seen[i] = 1 if clip["counter_halflife"] == 0 else seen[i] + 1
                threshold = float(seen[i]) * max(clip["ratio"] * float(w.norm()), clip["bound"])
                norm = float(g.norm())
                clipped[norm > threshold] += 1
                change = change * min(1.0, threshold / norm)
            expected[i] = (1 - lr * weight_decay) * w - change
    after = weights_of(model)["a"]
    assert (after[:-2] != before[:-2]).any(1).sum() > 5
    assert torch.equal(after[-2:], before[-2:])
    torch.testing.assert_close(after.double(), expected, rtol=1e-5, atol=1e-6)
    return clipped


@pytest.mark.parametrize("dim", [4, 8, 12])
@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_rowwise_adagrad_follows_its_formula(dim, eps):
    follow("fbgemm_rowwise_adagrad", dim=dim, lr=0.1, eps=eps)


@pytest.mark.parametrize("decay", [{}, {"l2": 0.05}, {"weight_decay": 0.2}], ids=str)
@pytest.mark.parametrize("halflife", [-1, 0])
@pytest.mark.parametrize("ratio, bound", [(0.1, 0.0), (0.0, 0.05), (0.1, 0.05)])
def test_fbgemms_cowclip_follows_its_formula(decay, halflife, ratio, bound):
    clip = {"ratio": ratio, "bound": bound, "counter_halflife": halflife}
    clipped = follow("fbgemm_cowclip", lr=0.1, eps=1e-3, **clip, **decay)
    assert min(clipped.values()) > 3
