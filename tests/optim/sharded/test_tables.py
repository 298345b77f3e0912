"""Tables updated in the backward of FBGEMM's lookup, against float64 plain PyTorch."""

from itertools import groupby

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import PoolingMode
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.exc import Unsupported

from stampede.optim import CowClip, local_cowclip_tables
from stampede.optim.rules import SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam
from stampede.optim.table_array import TableShard
from stampede.optim.update_settings import UpdateSettings
from support.bags import PLANS, Bags, jagged, shard, weights_of, with_cowclip
from support.updated_tables import (
    CLIP,
    WAYS,
    Tables,
    assert_follows,
    computed,
    of_rows,
    reference_of,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    dim=st.sampled_from([1, 4, 7, 8, 10]),
    shared=st.booleans(),
    kind=st.sampled_from(["sum", "mean", "sequence"]),
    weighted=st.booleans(),
    batch=st.integers(1, 4),
    keep=st.sampled_from(["all", "touched"]),
    rule=st.sampled_from([Adam(), RowWiseAdam(), Adagrad(), RowWiseAdagrad(), SGD(0.9)]),
    way=st.sampled_from(WAYS),
    seed=st.integers(0, 2**31),
)
def test_follows_the_equations(rows, dim, shared, kind, weighted, batch, keep, rule, way, seed):
    draw = torch.Generator().manual_seed(seed)
    features = list(range(len(rows)))
    if shared:
        features.append(features[-1])
    setting = UpdateSettings(rule=rule, l2=1e-4, clip=CLIP, rows=keep)
    pooling = {"sum": PoolingMode.SUM, "mean": PoolingMode.MEAN, "sequence": PoolingMode.NONE}
    with computed(way):
        tables = Tables(of_rows(*rows), [dim] * len(rows), features, pooling[kind], setting)
        reference = reference_of(tables.fill(draw), setting)
        for _ in range(5):
            # FBGEMM takes weights of samples for pooled lookups only.
            takes_weights = weighted and kind != "sequence"
            tables.train(draw, reference, batch, takes_weights, kind == "mean", kind == "sequence")
        assert_follows(tables, reference)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    order=st.permutations([("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0)]),
    cuts=st.sampled_from([(4, 8), (3, 7), (5, 11)]),
    columns=st.sampled_from([None, 3, 6]),
    rule=st.sampled_from([Adam(), RowWiseAdam(), RowWiseAdagrad()]),
    way=st.sampled_from(WAYS),
    seed=st.integers(0, 2**31),
)
def test_column_shards_of_mixed_widths_and_offsets(order, cuts, columns, rule, way, seed):
    """Tables of 12 columns: `a` and `b` in two parts, `c` whole, in any order in one TBE."""
    draw = torch.Generator().manual_seed(seed)
    rows = {"a": 5, "b": 3, "c": 6}
    first, second = cuts
    bounds = {"a": [0, first, 12], "b": [0, second, 12], "c": [0, 12]}
    shards = [TableShard(name, rows[name], 0, bounds[name][part]) for name, part in order]
    widths = [bounds[name][part + 1] - bounds[name][part] for name, part in order]
    clip = CowClip(ratio=0.5, bound=1e-3, columns=columns)
    setting = UpdateSettings(rule=rule, l2=1e-2, clip=clip)
    with computed(way):
        tables = Tables(shards, widths, list(range(5)), setting=setting, dim=12)
    # Neighbours of one place and width are one array.
    pairs = zip(shards, widths, strict=True)
    runs = groupby(pairs, key=lambda pair: (pair[0].column_offset, pair[1]))
    expected = [(*place, sum(part.rows for part, _ in run)) for place, run in runs]
    arrays = tables.tbe.arrays
    assert [(a.shards[0].column_offset, a.weights.shape[1], len(a.weights)) for a in arrays] == (
        expected
    )
    reference = reference_of(tables.fill(draw), setting)
    with computed(way):
        for _ in range(5):
            tables.train(draw, reference, batch=3)
        assert_follows(tables, reference)


def test_ids_after_the_last_bag_of_several_arrays_belong_to_none():
    tables = Tables(of_rows(9, 5), [4, 8], [0, 1], dim=8).tbe
    assert len(tables.arrays) == 2
    ids = torch.tensor([8, 0, 3, 4, 1, 2, 6, 7])
    offsets = torch.tensor([0, 1, 3, 5, 6])
    expected = tables(ids[:6], offsets)
    torch.testing.assert_close(tables(ids, offsets), expected)


def one_table(**arguments):
    return Tables(of_rows(5), [4], [0], **arguments).tbe


ID, OFFSETS = torch.tensor([1]), torch.tensor([0, 1])


@pytest.mark.parametrize("pooling", PoolingMode)
@pytest.mark.parametrize("output", [SparseType.FP32, SparseType.FP16])
def test_plain_torch_looks_up_what_fbgemm_does(pooling, output):
    """As on a GPU at widths that FBGEMM does not read there."""
    ids, offsets = torch.tensor([8, 0, 0, 4, 1, 2, 3]), torch.tensor([0, 0, 3, 3, 5, 5, 7])
    with computed("torch"):
        tables = Tables(of_rows(9, 5), [10, 10], [0, 1, 1], pooling, UpdateSettings())
        tables.fill(torch.Generator().manual_seed(0))
        tables.tbe.output_dtype = output.as_int()
        expected = tables.tbe(ids, offsets)
        (backend,) = tables.tbe.backends
        backend.must_pool = backend.needs_checked_ids = True
        torch.testing.assert_close(tables.tbe(ids, offsets), expected)


def test_weights_of_samples_have_no_gradient_where_sequences_ignore_them():
    weights = torch.ones(1, requires_grad=True)
    one_table(pooling=PoolingMode.NONE)(ID, OFFSETS, weights).sum().backward()
    assert torch.equal(weights.grad, torch.zeros(1))


def test_one_compiled_graph_around_a_lookup_is_refused():
    whole = torch.compile(one_table(), fullgraph=True, backend="eager")
    with pytest.raises(Unsupported, match="fullgraph=False, or compile the dense part"):
        whole(ID, OFFSETS)


def looked_up(plan):
    model = shard(with_cowclip(Bags(a=8)), plan)
    return model, model.module.ebc(jagged(["f_a"], torch.tensor([[1, 1, 3]] * 2))).wait()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_output_may_be_changed_in_place(plan):
    found = []
    for in_place in (True, False):
        model, output = looked_up(plan)
        values = output.values()
        values = values.mul_(2.0).add_(1.0) if in_place else values * 2.0 + 1.0
        values.square().sum().backward()
        found.append(weights_of(model)["a"])
    assert torch.equal(*found)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_gradient_of_the_output_alone_may_be_asked_for(plan):
    model, output = looked_up(plan)
    before = weights_of(model)["a"]
    values = output.values()
    (gradient,) = torch.autograd.grad(values.square().sum(), values, retain_graph=True)
    assert torch.equal(gradient, 2 * values)
    assert torch.equal(weights_of(model)["a"], before)
    values.square().sum().backward()
    assert not torch.equal(weights_of(model)["a"], before)
    assert {int(tables.step_count) for tables in local_cowclip_tables(model)} == {1}
