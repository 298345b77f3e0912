"""FBGEMM's own optimizers as baselines: settings, formulas, training."""

import inspect
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

from stampede.optim import CowClip, CowClipAdam
from stampede.optim.baselines import BASELINES, baseline_optimizer
from support.bags import Bags, jagged, shard, table_parameter, weights_of
from support.unsharded import process_group

ROWS, SAMPLES, IDS_PER_SAMPLE = 20, 6, 3
ON_CPU = {"fbgemm_rowwise_adagrad": {}, "fbgemm_cowclip": {"ratio": 0.1, "bound": 1e-3}}


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


def sharded(rules, dim=12):
    """Tables of one collection, by name the class and arguments of their optimizer."""
    model = Bags(**dict.fromkeys(rules, dim))
    for name, (optimizer, arguments) in rules.items():
        apply_optimizer_in_backward(optimizer, [table_parameter(model, name)], dict(arguments))
    return shard(model)


def train(model, ids, bags):
    """One step of every table with the same ids and gradient; a repeat in a bag counts twice."""
    names = [f for c in model.module.ebc._embedding_bag_configs for f in c.feature_names]
    sum((pooled * bags).sum() for pooled in model(jagged(names, ids)).values()).backward()


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


@pytest.mark.parametrize("decay", [{"l2": 0.05}, {"weight_decay": 0.2}], ids=str)
def test_rowwise_adagrads_decay_is_refused_where_fbgemm_ignores_it(decay):
    with pytest.raises(ValueError, match=r"on CPU FBGEMM silently ignores.*fbgemm_cowclip.*GPU"):
        baseline_optimizer("fbgemm_rowwise_adagrad", device_type="cpu", lr=0.1, **decay)


def test_adam_is_refused_on_cpu():
    with pytest.raises(ValueError, match="fbgemm_adam: FBGEMM has no Adam on CPU; choose Cow"):
        baseline_optimizer("fbgemm_adam", device_type="cpu", lr=0.1)


def test_settings_for_a_gpu_reach_fbgemm():
    tbe = on_meta("fbgemm_adam", lr=0.1, eps=1e-5, betas=(0.8, 0.7), weight_decay=0.3)
    assert tbe.get_learning_rate() == pytest.approx(0.1)
    taken = tbe.optimizer_args
    assert (taken.eps, taken.beta1, taken.beta2, taken.weight_decay) == (1e-5, 0.8, 0.7, 0.3)
    assert [set(state) for state in tbe.get_optimizer_state()] == [{"exp_avg", "exp_avg_sq"}]

    for decay, mode in (({"l2": 0.1}, "L2"), ({"weight_decay": 0.2}, "DECOUPLE")):
        taken = on_meta("fbgemm_rowwise_adagrad", lr=0.1, **decay).optimizer_args
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
        ("fbgemm_cowclip", {"l2": 0.1, "weight_decay": 0.1}, "one decay at a time"),
        ("fbgemm_cowclip", {"ratio": 0.0, "bound": 0.0}, "freezes every weight.*ratio=1"),
    ],
)
def test_settings_out_of_range_are_refused(name, settings, words):
    with pytest.raises(ValueError, match=words):
        baseline_optimizer(name, **{"device_type": "cuda", "lr": 0.1, **settings})


def follow(name, steps=6, dim=12, **settings):
    """A table and its expectation after some steps."""
    rule = baseline_optimizer(name, device_type="cpu", **settings)
    model = sharded({"a": rule}, dim)
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


def test_our_rule_and_baselines_share_a_collection():
    settings = {"lr": 0.05, "eps": 1e-4}
    rules = {
        name: baseline_optimizer(name, device_type="cpu", **settings, **own)
        for name, own in ON_CPU.items()
    }
    clip = CowClip(ratio=0.5, bound=1e-3)
    ours = {"ours": (CowClipAdam, {"lr": 0.01, "l2": 1e-3, "clip": clip})}
    together = sharded({**ours, **rules})
    alone = sharded(ours)
    before = weights_of(together)
    alone.load_state_dict({k: v for k, v in together.state_dict().items() if ".ours." in k})
    expected = {
        name: Expected(name, before[name], **settings, **own) for name, own in ON_CPU.items()
    }
    for _ in range(4):
        ids, bags, rows = batch(12)
        train(together, ids, bags)
        train(alone, ids, bags)
        for table in expected.values():
            table.step(rows, ids.flatten().tolist())
    found = weights_of(together)
    assert not torch.equal(found["ours"], before["ours"])
    assert torch.equal(found["ours"], weights_of(alone)["ours"])
    for name, table in expected.items():
        torch.testing.assert_close(found[name].double(), table.weights, rtol=1e-5, atol=1e-6)
