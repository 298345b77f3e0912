"""A small collection of pooled tables with CowClip, sharded in this one process."""

import torch
import torch.distributed as dist
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from stampede.optim import CowClip, CowClipAdam, cowclip_sharders
from support.gathering import tables_of

CPU = torch.device("cpu")
CLIP = CowClip(ratio=0.5, bound=1e-3)
WHOLE = table_wise(rank=0)
# Two parts on the one rank there is.
SPLIT = column_wise(ranks=[0, 0])
PLANS = {"whole": WHOLE, "split": SPLIT, "copies": data_parallel()}


class Bags(torch.nn.Module):
    def __init__(self, data_type=DataType.FP32, pooling=PoolingType.SUM, **tables):
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=20,
                embedding_dim=dim,
                feature_names=[f"f_{name}"],
                data_type=data_type,
                pooling=pooling,
            )
            for name, dim in tables.items()
        ]
        self.ebc = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))

    def forward(self, features):
        return self.ebc(features).to_dict()


def shard(model, kind=WHOLE, sharders=None, compute_kernel=None):
    sharders = sharders or cowclip_sharders()
    plan = construct_module_sharding_plan(
        model.ebc,
        {path.split(".")[1]: kind for path, _ in model.ebc.named_parameters()},
        local_size=dist.get_world_size(),
        world_size=dist.get_world_size(),
        device_type="cpu",
    )
    if kind is SPLIT:
        assert all(len(p.sharding_spec.shards) == 2 for p in plan.values())
    for parameter in plan.values():
        # TorchRec's default sharder does not know that the tables are fused.
        default = "dense" if parameter.sharding_type == "data_parallel" else "fused"
        parameter.compute_kernel = compute_kernel or default
    return DistributedModelParallel(
        model, device=CPU, plan=ShardingPlan({"ebc": plan}), sharders=sharders
    )


def with_cowclip(model, kind=CowClipAdam, only=None, **settings):
    """Give all tables, or one of them, an optimizer."""
    arguments = {"lr": 1e-2, "l2": 1e-4, "clip": CLIP, **settings}
    tables = model.ebc.parameters() if only is None else [table_parameter(model, only)]
    apply_optimizer_in_backward(kind, tables, arguments)
    return model


def table_parameter(model, name):
    return dict(model.ebc.named_parameters())[f"embedding_bags.{name}.weight"]


def jagged(features, ids):
    """The same bags `[samples, ids]` for every feature."""
    return KeyedJaggedTensor.from_lengths_sync(
        keys=features,
        values=ids.flatten().repeat(len(features)),
        lengths=torch.full((len(features) * len(ids),), ids.shape[1]),
    )


def step(model, ids=(1, 1, 3)):
    """Two samples with one bag of all `ids` per feature."""
    features = [f for c in model.module.ebc._embedding_bag_configs for f in c.feature_names]
    found = model(jagged(features, torch.tensor([ids, ids])))
    sum(values.square().sum() for values in found.values()).backward()


def weights_of(model):
    """Whole tables by name."""
    return tables_of(model)
