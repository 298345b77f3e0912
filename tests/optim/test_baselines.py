"""FBGEMM's own optimizers as baselines: settings, formulas, training."""

import inspect
import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    CowClipDefinition,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from stampede.engine.processes import processes
from stampede.optim import CowClip, CowClipAdam, cowclip_sharders
from stampede.optim.baselines import BASELINES, baseline_optimizer

ROWS, SAMPLES, IDS_PER_SAMPLE = 30, 6, 3
ON_CPU = {"fbgemm_rowwise_adagrad": {}, "fbgemm_cowclip": {"ratio": 0.1, "bound": 1e-3}}


class Expected:
    """One table in float64, moved as the docstring of `baseline_optimizer` says."""

    def __init__(self, name, weights, *, lr, l2=0.0, weight_decay=0.0, eps=1e-8,
                 betas=(0.9, 0.999), ratio=1.0, bound=1e-5, counter_halflife=-1):  # fmt: skip
        self.name, self.lr, self.l2, self.weight_decay, self.eps = name, lr, l2, weight_decay, eps
        self.betas, self.ratio, self.bound, self.halflife = betas, ratio, bound, counter_halflife
        self.weights = weights.double().clone()
        self.sums, self.seen = torch.zeros(2, len(weights), dtype=torch.float64)
        self.m, self.v = torch.zeros(2, *weights.shape, dtype=torch.float64)
        self.steps, self.clipped, self.kept = 0, 0, 0

    def step(self, grad, ids):
        self.steps += 1
        for i in sorted(set(ids)):
            w, g = self.weights[i], grad[i].double()
            if self.name == "fbgemm_adam":
                b1, b2 = self.betas
                self.m[i] = b1 * self.m[i] + (1 - b1) * g
                self.v[i] = b2 * self.v[i] + (1 - b2) * g * g
                root = (self.v[i] / (1 - b2**self.steps)).sqrt()
                change = self.m[i] / (1 - b1**self.steps) / (root + self.eps)
                self.weights[i] = w - self.lr * (change + self.weight_decay * w)
                continue
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


def test_the_step_can_be_set_before_the_first_lookup():
    """What `fbgemm_adam` needs after a checkpoint, tried with a rule that runs here."""
    model = shard({"a": baseline_optimizer("fbgemm_rowwise_adagrad", device_type="cpu", lr=0.1)})
    model.fused_optimizer.set_optimizer_step(5)
    train(model, *batch(12)[:2])
    (lookup,) = model.module.ebc._lookups
    assert int(lookup._emb_modules[0].emb_module.iter_cpu) == 6


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


@pytest.mark.parametrize("name", ON_CPU)
def test_the_learning_rate_is_changed_as_torchrec_does(name):
    model = shard({"a": baseline_optimizer(name, device_type="cpu", lr=0.1)})
    before = tables(model)["a"].clone()
    expected = Expected(name, before, lr=0.0)
    for lr in (0.0, 0.2):
        for group in model.fused_optimizer.param_groups:
            group["lr"] = expected.lr = lr
        model.fused_optimizer.step()
        ids, bags, rows = batch(12)
        train(model, ids, bags)
        expected.step(rows, ids.flatten().tolist())
        if lr == 0:
            assert torch.equal(tables(model)["a"], before)
    torch.testing.assert_close(tables(model)["a"].double(), expected.weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name, keys",
    [("fbgemm_rowwise_adagrad", ["momentum1"]),
     ("fbgemm_cowclip", ["momentum1", "prev_iter", "row_counter"])],
)  # fmt: skip
def test_a_checkpoint_continues_exactly_under_another_plan(name, keys, tmp_path):
    rule = baseline_optimizer(name, device_type="cpu", lr=0.1, **ON_CPU[name])
    batches = [batch(12)[:2] for _ in range(6)]
    model = shard({"a": rule})
    for ids, bags in batches[:3]:
        train(model, ids, bags)
    state = model.fused_optimizer.state_dict()["state"]["ebc.embedding_bags.a.weight"]
    assert {key: tuple(value.size()) for key, value in state.items()} == {
        f"a.{key}": (ROWS,) for key in keys
    }
    dcp.save(trained(model), checkpoint_id=str(tmp_path))
    for ids, bags in batches[3:]:
        train(model, ids, bags)

    other = shard({"a": rule}, kind=row_wise)
    dcp.load(trained(other), checkpoint_id=str(tmp_path))
    for ids, bags in batches[3:]:
        train(other, ids, bags)
    assert torch.equal(tables(other)["a"], tables(model)["a"])


def trained(model):
    """Tables and their optimizer's state, read and written in place."""
    return {"model": model.state_dict(), "fused": model.fused_optimizer.state_dict()["state"]}
