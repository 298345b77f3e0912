"""Tables with FBGEMM's own optimizers, and the same in float64."""

import math

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
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

from stampede.optim.baselines import baseline_optimizer

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
