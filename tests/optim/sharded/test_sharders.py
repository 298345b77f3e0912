"""Optimizers with CowClip inside TorchRec: what they are given and what they refuse."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.optim import apply_optimizer_in_backward as in_backward
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.distributed.model_tracker.types import TrackingMode
from torchrec.distributed.sharding_plan import get_default_sharders, row_wise
from torchrec.distributed.types import BoundsCheckMode
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import stampede.optim as optim
from stampede.optim import (
    CowClip,
    CowClipAdam,
    FrozenTables,
    TableInit,
    cowclip_sharders,
    local_cowclip_tables,
)
from stampede.optim.sharded.supported import SHARDING_TYPES
from support.bags import (
    CLIP,
    CPU,
    PLANS,
    Bags,
    shard,
    step,
    table_parameter,
    weights_of,
    with_cowclip,
)
from support.managed_collision import SparseArch
from support.reference import ReferenceTables


def test_fused_params_and_widths_that_an_optimizer_does_not_know_are_refused():
    wrong = {"weight_decay": 0.1, "eps": 1e-3}
    sharders = cowclip_sharders(fused_params={"output_dtype": DataType.FP32, **wrong})
    with pytest.raises(ValueError, match=r"has eps, weight_decay, .*apply_optimizer_in_backward"):
        shard(with_cowclip(Bags(a=8, b=8), only="a"), sharders=sharders)
    shard(Bags(a=8), sharders=sharders)
    with pytest.raises(AssertionError, match="divisible by 4"):  # TorchRec's.
        shard(with_cowclip(Bags(a=10, b=10), only="a"))


def test_torch_forgets_the_tables_that_were_sharded():
    """Otherwise each model of a process stays in its memory: 0.3 MB a training of 26 fields."""
    before = len(in_backward.param_to_acc_grad_map), len(in_backward.param_to_optim_hook_handle_map)
    model = with_cowclip(Bags(a=8, b=8))
    assert len(in_backward.param_to_acc_grad_map) == before[0] + 2
    table, optimizers = (
        weakref.ref(one)
        for one in (
            model.ebc.embedding_bags["a"].weight,
            model.ebc.embedding_bags["a"].weight._in_backward_optimizers[0],
        )
    )
    sharded = shard(model)
    step(sharded, [2, 3])
    del model, sharded
    gc.collect()
    assert table() is None and optimizers() is None
    after = len(in_backward.param_to_acc_grad_map), len(in_backward.param_to_optim_hook_handle_map)
    assert after == before


def test_an_id_outside_its_table_is_refused_by_a_fatal_check():
    sharders = cowclip_sharders(fused_params={"bounds_check_mode": BoundsCheckMode.FATAL})
    model = shard(with_cowclip(Bags(a=8)), sharders=sharders)
    with pytest.raises(RuntimeError, match="idx < num_rows"):
        step(model, [2, 99])
    (tables,) = local_cowclip_tables(model)
    # Nor may ids lie outside all bags.
    for offsets in ([2, 3, 5], [0, 1, 2]):
        with pytest.raises(RuntimeError, match="num_indices"):
            tables(torch.tensor([1, 1, 3]), torch.tensor(offsets))


@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16, DataType.BF16])
def test_by_default_an_id_outside_its_table_is_counted_and_means_the_first_row(data_type):
    # In the memory, row 25 of the first table would be one of the second.
    model = shard(with_cowclip(Bags(a=8, b=8, data_type=data_type), rows="touched"))
    (tables,) = local_cowclip_tables(model)
    before = weights_of(model)
    step(model, [2, 25])
    assert tables.bounds_check_warning.item() == 4
    for name, after in weights_of(model).items():
        assert (after != before[name]).any(1).nonzero().flatten().tolist() == [0, 2]


def test_there_is_a_sharder_for_every_module_that_torchrec_shards():
    ours, theirs = (
        [sharder.module_type for sharder in sharders]
        for sharders in (cowclip_sharders(), get_default_sharders())
    )
    assert len(ours) == len(set(ours))
    # Single bags are not among TorchRec's in every version.
    assert set(ours) == {*theirs, torch.nn.EmbeddingBag}


def test_the_log_names_every_tables_optimizer_and_warns_of_defaults(caplog):
    def lines(model, **plan):
        caplog.clear()
        with caplog.at_level("INFO", "stampede.optim"):
            shard(model, **plan)
        return [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "stampede.optim"]

    model = with_cowclip(Bags(a=8), lr=2e-3, l2=1e-5)
    updated = "are updated in their backward by"
    ours = "CowClipAdam (lr 0.002, l2 1e-05, clip cowclip, rows all)"
    assert lines(model) == [("INFO", f"tables a {updated} {ours}")]
    model = Bags(a=8, b=8)
    apply_optimizer_in_backward(RowWiseAdagrad, [table_parameter(model, "b")], {"lr": 0.5})
    warning = "a default: none was given; name one in apply_optimizer_in_backward"
    assert sorted(lines(model)) == [
        ("INFO", f"tables b {updated} TorchRec's RowWiseAdagrad (lr 0.5)"),
        ("WARNING", f"tables a {updated} TorchRec's EXACT_SGD (lr 0.01), {warning}"),
    ]
    # A default that the sharders were given is no surprise.
    sharders = cowclip_sharders(fused_params={"learning_rate": 0.3})
    expected = [("INFO", f"tables a {updated} TorchRec's EXACT_SGD (lr 0.3)")]
    assert lines(Bags(a=8), sharders=sharders) == expected
    # Replicated tables.
    left = "are left to the program's own optimizer"
    ((level, text),) = lines(Bags(a=8), kind=PLANS["copies"])
    assert level == "INFO" and left in text
    model = Bags(a=8)
    apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": 0.5})
    ((level, text),) = lines(model, kind=PLANS["copies"])
    assert level == "WARNING" and left in text
    assert "the SGD of apply_optimizer_in_backward does not update them" in text
    ((_, text),) = lines(with_cowclip(Bags(a=8)), kind=PLANS["copies"])
    assert "by CowClipAdam" in text and "no optimizer of the program may have them" in text


def test_an_optimizer_left_without_parameters_says_that_tables_need_none():
    model = shard(with_cowclip(Bags(a=8)), PLANS["copies"])
    left = dict(in_backward_optimizer_filter(model.named_parameters()))
    with pytest.raises(ValueError, match=r"CowClipAdam got no parameters.*data_parallel ones too"):
        KeyedOptimizerWrapper(left, lambda parameters: CowClipAdam(parameters, lr=0.1))


def test_tables_of_one_name_behind_two_managed_collisions_are_two():
    model = torch.nn.ModuleDict({name: SparseArch(pooled=True, rows=64) for name in ("x", "y")})
    tables = [p for name, p in model.named_parameters() if "embedding" in name]
    apply_optimizer_in_backward(CowClipAdam, tables, {"lr": 1e-2})
    model = DistributedModelParallel(model, device=CPU, sharders=cowclip_sharders())
    of_tables = [array.shards for tbe in local_cowclip_tables(model) for array in tbe.arrays]
    found = sorted(shard.table for shards in of_tables for shard in shards)
    assert found == ["x.mc.table_0", "x.mc.table_1", "y.mc.table_0", "y.mc.table_1"]


def test_changed_rows_are_tracked():
    model = shard(with_cowclip(Bags(a=8, b=8), rows="touched", only="a"))
    tracker, before = ModelDeltaTrackerTrec(model), weights_of(model)
    step(model, [1, 1, 3])
    found = {path.rpartition(".")[2]: ids for path, ids in tracker.get_unique_ids().items()}
    for name, after in weights_of(model).items():
        changed = (after != before[name]).any(1).nonzero().flatten()
        assert torch.equal(found[name].sort().values, changed)


@pytest.mark.parametrize(
    "kind, mode",
    [(optim.CowClipRowWiseAdagrad, "MOMENTUM_DIFF"), (CowClipAdam, "MOMENTUM_LAST"),
     (optim.CowClipRowWiseAdagrad, "ROWWISE_ADAGRAD")],
)  # fmt: skip
def test_states_of_changed_rows_are_tracked(kind, mode):
    """What was added to squared gradients, or the momentum before a row's last lookup."""
    model = shard(with_cowclip(Bags(a=8, b=8), kind, rows="touched"))
    step(model)
    tracker, states = ModelDeltaTrackerTrec(model, mode=TrackingMode[mode]), []
    for ids in ([1, 1, 3], [3, 4], []):
        of_tables = [s for tbe in local_cowclip_tables(model) for _, s in tbe.shard_states()]
        states.append([next(iter(state.values())).clone() for state in of_tables])
        if ids:
            step(model, ids)
            tracker.step()
    found = {path.rpartition(".")[2]: rows for path, rows in tracker.get_unique().items()}
    for name, first, second, last in zip("ab", *states, strict=True):
        assert found[name].ids.tolist() == [1, 3, 4]
        expected = (last - first)[[1, 3, 4]]
        if mode == "MOMENTUM_LAST":
            expected = torch.stack([first[1], second[3], second[4]]).norm(dim=1)
        torch.testing.assert_close(found[name].states, expected)
        assert found[name].states[:2].all()
    assert not torch.equal(found["a"].states, found["b"].states)


@pytest.mark.parametrize(
    "kind, mode, needed",
    [(CowClipAdam, "MOMENTUM_DIFF", "CowClipRowWiseAdagrad"),
     (optim.CowClipSGD, "MOMENTUM_LAST", "CowClipAdam")],
)  # fmt: skip
def test_states_that_no_table_keeps_are_not_tracked(kind, mode, needed):
    model = shard(with_cowclip(Bags(a=8), kind, rows="touched"))
    with pytest.raises(ValueError, match=f"{mode} needs {needed}"):
        ModelDeltaTrackerTrec(model, mode=TrackingMode[mode])


def test_several_optimizers_on_one_table_are_refused():
    for other in (torch.optim.SGD, CowClipAdam):
        model = with_cowclip(Bags(a=8))
        apply_optimizer_in_backward(other, model.ebc.parameters(), {"lr": 0.1})
        with pytest.raises(ValueError, match=rf"several.*CowClipAdam, {other.__name__}.*once"):
            shard(model)


def test_a_table_that_is_to_stay_as_it_is_is_frozen():
    model = with_cowclip(Bags(a=8, b=8), l2=0.1, only="b")
    model.ebc.requires_grad_(False)
    with pytest.raises(ValueError, match=r"'b' with CowClip has requires_grad=False.*FrozenTables"):
        shard(model)
    model.ebc.requires_grad_(True)
    apply_optimizer_in_backward(FrozenTables, [table_parameter(model, "a")], {})
    model = shard(model)
    before = weights_of(model)
    step(model, [2, 9])
    after = weights_of(model)
    torch.testing.assert_close(after["a"], before["a"], rtol=0, atol=0)
    assert not torch.equal(after["b"], before["b"])
    states = {tuple(array.states) for tbe in local_cowclip_tables(model) for array in tbe.arrays}
    assert states == {(), ("exp_avg", "exp_avg_sq")}
    with pytest.raises(ValueError, match="a frozen table has no l2 and no weight_decay"):
        FrozenTables([nn.Parameter(torch.ones(2, 2))], l2=1e-3)


def test_every_sharding_type_is_offered_with_the_kernel_of_its_update():
    sharder = cowclip_sharders()[0]
    for device in ("cpu", "cuda"):
        assert set(SHARDING_TYPES) <= set(sharder.sharding_types(device))
        for kind in SHARDING_TYPES:
            kernel = "dense" if kind == "data_parallel" else "fused"
            assert sharder.compute_kernels(kind, device) == [kernel]


def test_tables_of_several_settings_follow_their_own_equations():
    model = Bags(a=8, b=4, c=8)
    rules = {
        "a": ("adam", CowClipAdam, {"lr": 1e-2, "l2": 1e-3, "clip": CLIP}),
        "b": ("adam", CowClipAdam, {"lr": 2e-2, "clip": None, "rows": "touched"}),
        "c": ("sgd", optim.CowClipSGD, {"lr": 0.1, "momentum": 0.5, "clip": CowClip(ratio=0.1)}),
    }
    for name, (_, kind, arguments) in rules.items():
        apply_optimizer_in_backward(kind, [table_parameter(model, name)], arguments)
    given = copy.deepcopy(rules)
    model = shard(model)
    # TorchRec changes such dictionaries.
    assert rules == given
    start, references = weights_of(model), {}
    for name, (rule, _, arguments) in rules.items():
        options = {**arguments, **vars(arguments["clip"] or CowClip("none")), "rule": rule}
        del options["clip"]
        references[name] = ReferenceTables({name: start[name]}, **options)
    for _ in range(3):
        step(model)
        for name, reference in references.items():
            # Two samples, each with ids 1, 1, 3: d(sum of squares)/dw = 2 * bag * multiplicity.
            weights = reference.weights[name]
            bag = 2 * weights[1] + weights[3]
            grad, counts = torch.zeros_like(weights), torch.zeros(20, dtype=torch.int64)
            grad[1], grad[3] = 2 * 2 * bag * 2, 2 * bag * 2
            counts[1], counts[3] = 4, 2
            reference.step({name: grad}, {name: counts})
    for name, found in weights_of(model).items():
        expected = references[name].weights[name]
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


def test_initial_values_do_not_depend_on_the_plan():
    init = TableInit(std=0.1, columns=6)
    found = [
        weights_of(shard(with_cowclip(Bags(a=8)), plan, cowclip_sharders(init)))["a"]
        for plan in (*PLANS.values(), row_wise())
    ]
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert found[0][:, 6:].abs().max() == 0
    assert found[0][:, :6].std() == pytest.approx(0.1, rel=0.3)


def test_a_tables_own_init_fn_is_kept_unless_an_init_is_given():
    for init, expected in ((None, 0.5), (TableInit(std=0.0), 0.0)):
        model = Bags(a=8, b=8)
        model.ebc.embedding_bag_configs()[0].init_fn = lambda t: torch.nn.init.constant_(t, 0.5)
        found = weights_of(shard(with_cowclip(model), sharders=cowclip_sharders(init)))
        assert (found["a"] == expected).all()
        assert not (found["b"] == 0.5).any()
