"""CowClipAdam inside TorchRec: what it is given, what it refuses, what it keeps."""

import copy

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from stampede.engine.processes import processes
from stampede.optim import (
    CowClip,
    CowClipAdam,
    TableInit,
    cowclip_sharders,
    local_cowclip_tables,
)
from support.reference import ReferenceTable

CPU = torch.device("cpu")
CLIP = CowClip(ratio=0.5, bound=1e-3)


@pytest.fixture(scope="module", autouse=True)
def process_group():
    with processes("cpu") as here:
        yield here


class Bags(torch.nn.Module):
    def __init__(self, **tables):
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=name, num_embeddings=20, embedding_dim=dim, feature_names=[f"f_{name}"]
            )
            for name, dim in tables.items()
        ]
        self.ebc = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))

    def forward(self, kjt):
        return self.ebc(kjt).to_dict()


def shard(model, kind=table_wise, sharders=None):
    sharders = sharders or cowclip_sharders()
    placement = {"ranks": [0]} if kind is column_wise else {"rank": 0}
    arguments = placement if kind in (table_wise, column_wise) else {}
    plan = construct_module_sharding_plan(
        model.ebc,
        {config.name: kind(**arguments) for config in model.ebc.embedding_bag_configs()},
        # TorchRec's own sharder builds also the plans that ours refuses.
        sharder=None if kind in (data_parallel, column_wise) else sharders[0],
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    return DistributedModelParallel(
        model, device=CPU, plan=ShardingPlan({"ebc": plan}), sharders=sharders
    )


def with_cowclip(model, **settings):
    arguments = {"lr": 1e-2, "l2": 1e-4, "clip": CLIP, **settings}
    apply_optimizer_in_backward(CowClipAdam, model.ebc.parameters(), arguments)
    return model


def bags(features, ids):
    """One bag of all `ids` per feature, for two samples."""
    return KeyedJaggedTensor.from_lengths_sync(
        keys=features,
        values=torch.tensor(ids * 2 * len(features)),
        lengths=torch.full((2 * len(features),), len(ids)),
    )


def step(model, ids=(1, 1, 3)):
    features = [f for c in configs(model) for f in c.feature_names]
    sum(v.square().sum() for v in model(bags(features, list(ids))).values()).backward()


def configs(model):
    return model.module.ebc._embedding_bag_configs


@pytest.mark.parametrize(
    "tables, kind, settings, words",
    [
        ({"a": 10}, table_wise, {}, ["'a'", "embedding_dim 10", "12", "CowClip(columns=10)"]),
        ({"a": 8}, data_parallel, {}, ["'data_parallel'", "table_wise, row_wise"]),
        ({"a": 8}, column_wise, {}, ["'column_wise'", "table_wise, row_wise"]),
        ({"a": 8}, table_wise, {"clip": CowClip(columns=9)}, ["columns=9", "embedding_dim 8"]),
    ],
)
def test_what_is_not_exact_is_refused_when_sharding(tables, kind, settings, words):
    with pytest.raises(ValueError) as failure:
        shard(with_cowclip(Bags(**tables), **settings), kind)
    for word in words:
        assert word in str(failure.value)


def test_other_dtypes_are_refused():
    model = with_cowclip(Bags(a=8))
    model.ebc.embedding_bag_configs()[0].data_type = DataType.FP16
    with pytest.raises(ValueError, match=r"FP16.*DataType.FP32"):
        shard(model)


@pytest.mark.parametrize("arguments", [{"lr": -1.0}, {"l2": float("nan")}, {"rows": "some"}])
def test_settings_out_of_range_are_refused_at_once(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        with_cowclip(Bags(a=8), **arguments)


def test_the_planner_is_offered_only_exact_types():
    model = with_cowclip(Bags(a=8, b=4))
    topology = Topology(world_size=2, local_world_size=2, compute_device="cpu")
    sharders = cowclip_sharders()
    plan = EmbeddingShardingPlanner(topology=topology).plan(model, sharders)
    assert {p.sharding_type for p in plan.plan["ebc"].values()} <= {
        "table_wise", "row_wise", "table_row_wise",
    }  # fmt: skip
    for device in ("cpu", "cuda"):
        types = sharders[0].sharding_types(device)
        assert sorted(types) == ["row_wise", "table_row_wise", "table_wise"]
        assert all(sharders[0].compute_kernels(kind, device) == ["fused"] for kind in types)


def test_the_planner_counts_weights_and_both_moments():
    model = with_cowclip(Bags(a=8))
    planner = EmbeddingShardingPlanner(topology=Topology(world_size=1, compute_device="cpu"))
    planner.plan(model, cowclip_sharders())
    options = planner._enumerator.enumerate(model, cowclip_sharders())
    rows = [sum(s.storage.ddr for s in o.shards) for o in options if o.sharding_type == "row_wise"]
    table = 20 * 8 * 4
    plain = EmbeddingShardingPlanner(topology=Topology(world_size=1, compute_device="cpu"))
    bare = plain._enumerator.enumerate(Bags(a=8), cowclip_sharders())
    without = [sum(s.storage.ddr for s in o.shards) for o in bare if o.sharding_type == "row_wise"]
    assert rows[0] - without[0] == 2 * table


def test_tables_of_several_widths_and_settings_follow_their_own_equations():
    model = Bags(a=8, b=4, c=8)
    parameters = dict(model.ebc.named_parameters())
    rules = {
        "a": {"lr": 1e-2, "l2": 1e-3, "clip": CLIP},
        "b": {"lr": 2e-2, "l2": 0.0, "clip": None, "rows": "touched"},
        "c": {"lr": 1e-2, "l2": 1e-3, "clip": CowClip(ratio=0.1, bound=1e-3)},
    }
    for name, rule in rules.items():
        parameter = parameters[f"embedding_bags.{name}.weight"]
        apply_optimizer_in_backward(CowClipAdam, [parameter], dict(rule))
    model = shard(model)
    weights = {
        name: tensor
        for tables in local_cowclip_tables(model)
        for name, tensor in zip(tables.table_names, tables.split_embedding_weights(), strict=True)
    }
    references = {name: ReferenceTable(weights[name]) for name in rules}
    for t in (1, 2, 3):
        step(model)
        for name, rule in rules.items():
            reference = references[name]
            # Two samples, each with ids 1, 1, 3: d(sum of squares)/dw = 2 * bag * multiplicity.
            bag = 2 * reference.weights[1] + reference.weights[3]
            grad, counts = torch.zeros_like(reference.weights), torch.zeros(20, dtype=torch.int64)
            grad[1], grad[3] = 2 * 2 * bag * 2, 2 * bag * 2
            counts[1], counts[3] = 4, 2
            clip = rule["clip"]
            arguments = {} if clip is None else {"ratio": clip.ratio, "bound": clip.bound}
            reference.step(grad, counts, t, lr=rule["lr"], l2=rule["l2"],
                           rows=rule.get("rows", "all"), **arguments)  # fmt: skip
    for name, reference in references.items():
        torch.testing.assert_close(weights[name].double(), reference.weights, rtol=1e-4, atol=1e-6)


def test_tables_without_cowclip_keep_torchrecs_optimizer():
    model = Bags(a=8, b=8)
    parameters = dict(model.ebc.named_parameters())
    apply_optimizer_in_backward(CowClipAdam, [parameters["embedding_bags.a.weight"]], {"lr": 0.0})
    apply_optimizer_in_backward(
        torch.optim.SGD, [parameters["embedding_bags.b.weight"]], {"lr": 0.5}
    )
    model = shard(model)
    assert [t.table_names for t in local_cowclip_tables(model)] == [["a"]]
    before = {k: v.local_shards()[0].tensor.clone() for k, v in model.state_dict().items()}
    step(model, [1])
    for key, value in model.state_dict().items():
        changed = (value.local_shards()[0].tensor != before[key]).any(1).nonzero().flatten()
        assert changed.tolist() == ([1] if ".b." in key else [])


def test_state_is_torchrecs_and_continues_exactly():
    model = shard(with_cowclip(Bags(a=8)))
    step(model)
    state = model.fused_optimizer.state_dict()
    table = state["state"]["ebc.embedding_bags.a.weight"]
    assert {k: tuple(v.size()) for k, v in table.items()} == {
        "a.momentum1": (20, 8), "a.exp_avg_sq": (20, 8), "a.step": (),
    }  # fmt: skip
    assert int(table["a.step"]) == 1
    saved, weights = copy.deepcopy(state), copy.deepcopy(model.state_dict())
    step(model)
    expected = local_cowclip_tables(model)[0].table.weights.clone()

    other = shard(with_cowclip(Bags(a=8)), row_wise)
    other.load_state_dict(weights)
    other.fused_optimizer.load_state_dict(saved)
    step(other)
    assert torch.equal(local_cowclip_tables(other)[0].table.weights, expected)


def test_the_learning_rate_is_changed_as_torchrec_does():
    model = shard(with_cowclip(Bags(a=8)))
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 0.0
    model.fused_optimizer.step()
    before = local_cowclip_tables(model)[0].table.weights.clone()
    step(model)
    assert torch.equal(local_cowclip_tables(model)[0].table.weights, before)


def test_initial_values_do_not_depend_on_the_plan():
    init = TableInit(std=0.1, columns=6)
    found = [
        local_cowclip_tables(shard(with_cowclip(Bags(a=8)), kind, cowclip_sharders(init)))[0]
        for kind in (table_wise, row_wise)
    ]
    torch.testing.assert_close(found[0].table.weights, found[1].table.weights, rtol=0, atol=0)
    assert found[0].table.weights[:, 6:].abs().max() == 0
    assert found[0].table.weights[:, :6].std() == pytest.approx(0.1, rel=0.3)


def test_a_tables_own_init_fn_is_kept_unless_an_init_is_given():
    for init, expected in ((None, 0.5), (TableInit(std=0.0), 0.0)):
        model = Bags(a=8, b=8)
        model.ebc.embedding_bag_configs()[0].init_fn = lambda t: torch.nn.init.constant_(t, 0.5)
        model = shard(with_cowclip(model), sharders=cowclip_sharders(init))
        first, second = local_cowclip_tables(model)[0].split_embedding_weights()
        assert (first == expected).all()
        assert not (second == 0.5).any()


def test_resharding_in_place_is_refused():
    model = shard(with_cowclip(Bags(a=8)))
    with pytest.raises(ValueError, match="checkpoint"):
        model.module.ebc.update_shards({}, None, CPU)


def test_a_dense_optimizer_is_not_offered_the_tables():
    model = shard(with_cowclip(Bags(a=8)))
    assert dict(in_backward_optimizer_filter(model.named_parameters())) == {}


def test_the_users_arguments_are_left_alone():
    arguments = {"lr": 1e-2, "l2": 1e-4, "clip": CLIP}
    model = Bags(a=8)
    apply_optimizer_in_backward(CowClipAdam, model.ebc.parameters(), arguments)
    parameter = next(model.ebc.parameters())
    shard(model)
    assert arguments == {"lr": 1e-2, "l2": 1e-4, "clip": CLIP}
    assert parameter._optimizer_classes == [CowClipAdam]


def test_without_our_sharders_torchrec_refuses():
    with pytest.raises(ValueError, match="Cannot cast"):
        shard(with_cowclip(Bags(a=8)), sharders=[EmbeddingBagCollectionSharder()])
    assert dist.is_initialized()
