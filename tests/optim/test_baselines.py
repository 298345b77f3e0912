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
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from stampede.optim.baselines import baseline_optimizer
from support.bags import Bags, jagged, shard, weights_of
from support.ranks import process_group

ROWS, SAMPLES, IDS_PER_SAMPLE = 20, 6, 3


class Expected:
    """One table in float64, moved as the docstring of `baseline_optimizer` says."""

    def __init__(self, name, weights, *, lr, l2=0.0, weight_decay=0.0, eps=1e-8,
                 ratio=1.0, bound=1e-5, counter_halflife=-1):  # fmt: skip
        self.name, self.lr, self.l2, self.weight_decay, self.eps = name, lr, l2, weight_decay, eps
        self.ratio, self.bound, self.halflife = ratio, bound, counter_halflife
        self.weights = weights.double().clone()
        self.sums, self.seen = torch.zeros(2, len(weights), dtype=torch.float64)
        self.clipped, self.kept = 0, 0

    def step(self, grad, ids):
        for i in sorted(set(ids)):
            w, g = self.weights[i], grad[i].double()
            g = g + 2 * self.l2 * w
            self.sums[i] += float(g @ g) / len(g)
            change = self.lr / (math.sqrt(self.sums[i]) + self.eps) * g
            if self.name == "fbgemm_cowclip":
                self.seen[i] = 1 if self.halflife == 0 else self.seen[i] + 1
                threshold = float(self.seen[i]) * max(self.ratio * float(w.norm()), self.bound)
                over = float(g.norm()) > threshold
                self.clipped, self.kept = self.clipped + over, self.kept + (not over)
                if over:
                    change = change * threshold / float(g.norm())
            self.weights[i] = (1 - self.lr * self.weight_decay) * w - change


@pytest.fixture(scope="module", autouse=True)
def _group():
    with process_group():
        torch.manual_seed(0)
        yield


def train(model, ids, bags):
    """One step with a gradient of each bag; a repeat in a bag counts twice."""
    (model(jagged(["f_a"], ids))["f_a"] * bags).sum().backward()


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


def batch(dim):
    """Ids with repeats, the gradient of their bags, and that of the rows."""
    ids = torch.randint(0, ROWS - 2, (SAMPLES, IDS_PER_SAMPLE))
    # Rows of very different gradient, so that some are clipped and some are not.
    bags = 0.2 * torch.randn(SAMPLES, dim) * 10.0 ** torch.randint(-3, 1, (SAMPLES, 1))
    rows = torch.zeros(ROWS, dim, dtype=torch.float64)
    rows.index_add_(0, ids.flatten(), bags.double().repeat_interleave(IDS_PER_SAMPLE, 0))
    return ids, bags, rows


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
        *(
            ("fbgemm_rowwise_adagrad", "cpu", decay,
             "on CPU FBGEMM silently ignores.*fbgemm_cowclip.*GPU")
            for decay in ({"l2": 0.05}, {"weight_decay": 0.2})
        ),
        ("fbgemm_cowclip", "cuda", {"l2": 0.1, "weight_decay": 0.1}, "one decay at a time"),
        ("fbgemm_cowclip", "cuda", {"ratio": 0.0, "bound": 0.0}, "freezes every weight.*ratio=1"),
    ],
)  # fmt: skip
def test_settings_that_fbgemm_cannot_follow_are_refused(name, device, settings, words):
    with pytest.raises(ValueError, match=words):
        baseline_optimizer(name, device_type=device, lr=0.1, **settings)


def follow(name, steps=6, dim=12, **settings):
    """A table and its expectation after some steps."""
    rule = baseline_optimizer(name, device_type="cpu", **settings)
    model = Bags(a=dim)
    apply_optimizer_in_backward(rule[0], model.ebc.parameters(), rule[1])
    model = shard(model)
    before = weights_of(model)["a"]
    expected = Expected(name, before, **settings)
    for _ in range(steps):
        ids, bags, rows = batch(dim)
        train(model, ids, bags)
        expected.step(rows, ids.flatten().tolist())
    after = weights_of(model)["a"]
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
