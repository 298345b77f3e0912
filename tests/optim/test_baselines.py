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
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from stampede.engine.processes import processes
from stampede.optim import CowClip, CowClipAdam, cowclip_sharders
from stampede.optim.baselines import BASELINES, baseline_optimizer

ROWS, SAMPLES, IDS_PER_SAMPLE = 30, 6, 3
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


class Bags(torch.nn.Module):
    def __init__(self, **dims):
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=name, num_embeddings=ROWS, embedding_dim=dim, feature_names=[f"f_{name}"]
            )
            for name, dim in dims.items()
        ]
        self.ebc = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))

    def forward(self, kjt):
        return self.ebc(kjt).to_dict()


def shard(rules, dim=12, kind=table_wise, sharder=None):
    """Tables of one collection, by name the class and arguments of their optimizer."""
    model = Bags(**dict.fromkeys(rules, dim))
    for name, (optimizer, arguments) in rules.items():
        parameter = model.ebc.embedding_bags[name].weight
        apply_optimizer_in_backward(optimizer, [parameter], dict(arguments))
    plan = construct_module_sharding_plan(
        model.ebc,
        {name: kind(**({"rank": 0} if kind is table_wise else {})) for name in rules},
        sharder=None,
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    return DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=ShardingPlan({"ebc": plan}),
        sharders=[sharder or EmbeddingBagCollectionSharder()],
    )


def tables(model):
    shards = {key: value.local_shards() for key, value in model.state_dict().items()}
    return {key.split(".")[-2]: shard.tensor for key, (shard,) in shards.items()}


def batch(dim):
    """Ids with repeats, the gradient of their bags, and that of the rows."""
    ids = torch.randint(0, ROWS - 2, (SAMPLES, IDS_PER_SAMPLE))
    # Rows of very different gradient, so that some are clipped and some are not.
    bags = 0.2 * torch.randn(SAMPLES, dim) * 10.0 ** torch.randint(-3, 1, (SAMPLES, 1))
    rows = torch.zeros(ROWS, dim, dtype=torch.float64)
    rows.index_add_(0, ids.flatten(), bags.double().repeat_interleave(IDS_PER_SAMPLE, 0))
    return ids, bags, rows


def train(model, ids, bags):
    """One step of every table with the same ids and gradient; a repeat in a bag counts twice."""
    names = [config.name for config in model.module.ebc._embedding_bag_configs]
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=[f"f_{name}" for name in names],
        values=ids.flatten().repeat(len(names)),
        lengths=torch.full((SAMPLES * len(names),), IDS_PER_SAMPLE),
    )
    sum((pooled * bags).sum() for pooled in model(features).values()).backward()


def tables_on(device, name, dim=12, **settings):
    """One table of FBGEMM with a baseline, without TorchRec."""
    on_cpu = device == "cpu"
    kind = "cpu" if on_cpu else "cuda"
    optimizer, arguments = baseline_optimizer(name, device_type=kind, **settings)
    location = EmbeddingLocation.HOST if on_cpu else EmbeddingLocation.DEVICE
    compute = ComputeDevice.CPU if on_cpu else ComputeDevice.CUDA
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, dim, location, compute)],
        device=torch.device(device),
        optimizer=optimizer_type_to_emb_opt_type(optimizer),
        learning_rate=arguments.pop("lr"),
        **arguments,
    )


@pytest.fixture(scope="module", autouse=True)
def process_group():
    with processes("cpu") as here:
        yield here


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("decay", [{"l2": 0.05}, {"weight_decay": 0.2}], ids=str)
def test_rowwise_adagrads_decay_is_refused_where_fbgemm_ignores_it(decay):
    with pytest.raises(ValueError, match=r"on CPU FBGEMM silently ignores.*fbgemm_cowclip.*GPU"):
        baseline_optimizer("fbgemm_rowwise_adagrad", device_type="cpu", lr=0.1, **decay)


def test_adam_is_refused_on_cpu():
    with pytest.raises(ValueError, match="fbgemm_adam: FBGEMM has no Adam on CPU; choose Cow"):
        baseline_optimizer("fbgemm_adam", device_type="cpu", lr=0.1)


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


def test_our_rule_and_baselines_share_a_collection():
    settings = {"lr": 0.05, "eps": 1e-4}
    rules = {
        name: baseline_optimizer(name, device_type="cpu", **settings, **own)
        for name, own in ON_CPU.items()
    }
    clip = CowClip(ratio=0.5, bound=1e-3)
    ours = {"ours": (CowClipAdam, {"lr": 0.01, "l2": 1e-3, "clip": clip})}
    together = shard({**ours, **rules}, sharder=cowclip_sharders()[0])
    alone = shard(ours, sharder=cowclip_sharders()[0])
    before = tables(together)["ours"].clone()
    tables(alone)["ours"].copy_(before)
    expected = {
        name: Expected(name, tables(together)[name], **settings, **own)
        for name, own in ON_CPU.items()
    }
    for _ in range(4):
        ids, bags, rows = batch(12)
        train(together, ids, bags)
        train(alone, ids, bags)
        for table in expected.values():
            table.step(rows, ids.flatten().tolist())
    found = tables(together)
    assert not torch.equal(found["ours"], before)
    assert torch.equal(found["ours"], tables(alone)["ours"])
    for name, table in expected.items():
        torch.testing.assert_close(found[name].double(), table.weights, rtol=1e-5, atol=1e-6)
