"""What TorchRec can do and tables with CowClip refuse, with the sentences of the manual."""

import html
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchrec import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig, PoolingType
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import set_ec_index_dedup
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import get_default_sharders, grid_shard, row_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from stampede.optim import CowClipAdam, cowclip_sharders
from stampede.optim.sharded.supported import check_environment
from support import bags
from support import two_tables as two
from support.paths import ROOT


def _planned(model: nn.Module, kind: str) -> nn.Module:
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"),
        constraints={name: ParameterConstraints(sharding_types=[kind]) for name in "ab"},
    )
    sharders = cowclip_sharders()
    plan = planner.plan(two.with_optimizer(model), sharders)
    return DistributedModelParallel(model, device=two.CPU, plan=plan, sharders=sharders)


def _backward_twice(model: nn.Module, step: Callable[[], Any]) -> None:
    model(two.features()).sum().backward()
    step()
    model(two.features()).sum().backward()
    model(two.features()).sum().backward()


def _accumulation() -> None:
    model = two.shard(two.Model())
    _backward_twice(model, two.dense_optimizer(model).step)


def _scaler() -> None:
    model = two.shard(two.Model())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    dense = two.dense_optimizer(model)
    for _ in range(2):
        scaler.scale(model(two.features()).sum()).backward()
        scaler.step(dense)


def _late_lookup() -> None:
    model = two.shard(two.Model())
    first, second = model(two.features(1)).sum(), model(two.features(2)).sum()
    first.backward()
    second.backward()


def _deduplication() -> None:
    set_ec_index_dedup(True)
    try:
        two.shard(nn.Sequential(EmbeddingCollection(two.tables(kind=EmbeddingConfig))))
    finally:
        set_ec_index_dedup(False)


def _reentrant() -> None:
    model = two.shard(two.Model())
    start = torch.ones(1, requires_grad=True)
    checkpoint(
        lambda factor: (model(two.features()) * factor).sum(), start, use_reentrant=True
    ).backward()


def _two_modules() -> None:
    model = nn.Module()
    model.first, model.second = (EmbeddingBagCollection(two.tables("a")) for _ in range(2))
    model.second.embedding_bags["a"].weight = model.first.embedding_bags["a"].weight
    two.shard(model)


def _single_bag() -> None:
    bag = nn.EmbeddingBag(20, 8, mode="sum", include_last_offset=True)
    apply_optimizer_in_backward(CowClipAdam, bag.parameters(), {"lr": 0.1})
    DistributedModelParallel(nn.Sequential(bag), device=two.CPU, sharders=cowclip_sharders())


def _variable_sequences() -> None:
    model = two.shard(nn.Sequential(EmbeddingCollection(two.tables(kind=EmbeddingConfig))))
    model(
        KeyedJaggedTensor(
            keys=["fa", "fb"],
            values=torch.tensor([1, 2, 3]),
            lengths=torch.tensor([1, 1, 1]),
            stride_per_key_per_rank=[[2], [1]],
            inverse_indices=(["fa", "fb"], torch.tensor([[0, 1], [0, 0]])),
        )
    )


def _outside() -> None:
    model = _bags(a=8)
    table = dict(model.named_parameters())["ebc.embedding_bags.a.weight"]
    table.square().sum().backward()


def _no_id() -> None:
    bags.step(_bags(a=8), (1, -1))


def _unannounced_weights() -> None:
    model = _bags(row_wise(), a=8, pooling=PoolingType.MEAN)
    model(KeyedJaggedTensor(["f_a"], torch.tensor([1]), torch.ones(1), torch.tensor([1])))


def _weights_by_rows() -> None:
    learnable = partial(torch.ones, requires_grad=True)
    _planned(two.Model(weighted=True), "row_wise")(two.features(weights=learnable))


def _bags(plan: Any = bags.WHOLE, kernel: str | None = None, **given: Any) -> nn.Module:
    settings = {key: given.pop(key) for key in ("rows",) if key in given}
    model = bags.with_cowclip(bags.Bags(**given), **settings)
    return bags.shard(model, plan, compute_kernel=kernel)


def _int8_rows() -> None:
    registry = get_qcomm_codecs_registry(QCommsConfig(backward_precision=CommType.INT8))
    sharders = cowclip_sharders(qcomm_codecs_registry=registry)
    bags.shard(bags.with_cowclip(bags.Bags(a=8)), row_wise(), sharders)


def _part_of_the_processes() -> None:
    check_environment(ShardingEnv.from_local(world_size=2, rank=0))


REFUSED: dict[str, Callable[[], Any]] = {
    "TorchRec's own sharders": lambda: two.shard(two.Model(), get_default_sharders()),
    "gradient accumulation that is not announced": _accumulation,
    "`GradScaler`": _scaler,
    "semi-synchronous pipelines": _late_lookup,
    "`set_ec_index_dedup(True)`": _deduplication,
    "reentrant activation checkpointing of a lookup": _reentrant,
    "one table in two modules": _two_modules,
    "a single `nn.EmbeddingBag`": _single_bag,
    "variable batch size per feature in an `EmbeddingCollection`": _variable_sequences,
    "a gradient of a table's weights from outside of its lookup": _outside,
    "an id of -1": _no_id,
    "mean pooling by rows of a batch with weights, `is_weighted=False`": _unannounced_weights,
    "learnable per-sample weights where TorchRec loses their gradient": _weights_by_rows,
    "delta tracker with `rows: all`": lambda: ModelDeltaTrackerTrec(_bags(a=8, rows="all")),
    "tables in host memory (`fused_uvm_caching`)": lambda: _bags(a=8, kernel="fused_uvm_caching"),
    "INT8 tables": lambda: _bags(a=8, data_type=DataType.INT8),
    "INT8 communication of rows added up by ranks": _int8_rows,
    "mean pooling under `grid_shard`": lambda: _bags(
        grid_shard(host_indexes=[0]), a=8, pooling=PoolingType.MEAN
    ),
    "2D parallelism, or a part of the processes": _part_of_the_processes,
    "resharding in place": lambda: _bags(a=8).module.ebc.update_shards({}, None, two.CPU),
}

TABLE = (ROOT / "docs/torchrec.md").read_text(encoding="utf-8")
SENTENCES = dict(re.findall(r"^\| (.*) \| refused: (.*) \|$", TABLE, re.M))


def test_the_manual_has_every_refusal():
    assert SENTENCES.keys() == REFUSED.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_torchrec_features_are_refused_as_the_manual_says(name):
    with pytest.raises((ValueError, IndexError, AttributeError)) as failure:
        REFUSED[name]()
    assert str(failure.value) == html.unescape(SENTENCES[name])
