"""Tables updated in the backward of FBGEMM's lookup, against float64 plain PyTorch."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.distributed.types import ShardingEnv

from stampede.optim import CowClip, CowClipTables
from stampede.optim.rules import SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam
from stampede.optim.settings import UpdateSettings
from stampede.optim.sharded.backward_update import BackwardUpdate
from stampede.optim.sharded.layout import CollectionLayout
from stampede.optim.sharded.misuse import MisuseGuard
from stampede.optim.sharded.tables import Reached
from stampede.optim.table_array import TableShard
from support.parts import reference_of

CLIP = CowClip(ratio=0.5, bound=1e-3)
SETTINGS = UpdateSettings(l2=1e-4, clip=CLIP)
LR = 1e-2


class Tables:
    """A TBE of shards, with the owner that TorchRec's collections would give it."""

    def __init__(
        self,
        shards,
        widths,
        features,
        pooling=PoolingMode.SUM,
        setting=SETTINGS,
        dim=None,
        lr=LR,
        precision=SparseType.FP32,
    ):
        tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [
                (shard.rows, columns, EmbeddingLocation.HOST, ComputeDevice.CPU)
                for shard, columns in zip(shards, widths, strict=True)
            ],
            feature_table_map=features,
            pooling_mode=pooling,
            weights_precision=precision,
            device=torch.device("cpu"),
            learning_rate=lr,
        )
        self.tbe = CowClipTables.adopt(tbe, shards, setting, dim or widths[0])
        self.shards, self.widths, self.features = shards, widths, features
        names = tuple(sorted({shard.table for shard in shards}))
        layout = CollectionLayout(
            names, {(s.table, s.row_offset): (0,) for s in shards if s.column_offset}
        )
        owner = BackwardUpdate(MisuseGuard(one_backward_per_step=False))
        number = owner.add_collection(
            self,
            layout,
            dict.fromkeys(names, setting),
            helen={},
            env=ShardingEnv.from_local(1, 0),
            device=torch.device("cpu"),
        )
        self.tbe.owner = owner
        # The owner does not keep its collections alive.
        self.tbe.collection = self
        self.tbe.register_forward_hook(lambda _m, _i, out: Reached.apply(out, owner, number))

    def cowclip_tables(self):
        """As TorchRec's collections with CowClip."""
        return [self.tbe]

    def fill(self, draw):
        """Random weights, row norms over three decades; returns them as whole tables."""
        for weights in self.tbe.split_embedding_weights():
            scale = 10.0 ** -torch.randint(0, 3, (len(weights), 1), generator=draw)
            weights.copy_(torch.randn(weights.shape, generator=draw) * scale)
        return self.whole_tables()

    def whole_tables(self):
        pieces = zip(self.shards, self.tbe.split_embedding_weights(), strict=True)
        whole = {}
        for shard, weights in sorted(pieces, key=lambda piece: piece[0].column_offset):
            whole.setdefault(shard.table, []).append(weights.double())
        return {name: torch.cat(parts, 1) for name, parts in whole.items()}

    def train(self, draw, reference, batch, weighted=False, mean=False, sequence=False):
        """One random step here and in the reference; ids repeat within and across bags."""
        # Column shards of one feature receive the same ids.
        keys = [self._feature_of_table(position) for position in range(len(self.features))]
        lengths_of, ids_of, factors_of = {}, {}, {}
        for key, table in zip(keys, self.features, strict=True):
            if key not in ids_of:
                lengths_of[key] = torch.randint(0, 4, (batch,), generator=draw)
                total, rows = int(lengths_of[key].sum()), self.shards[table].rows
                ids_of[key] = torch.randint(0, rows, (total,), generator=draw)
                factors_of[key] = torch.rand(total, generator=draw)
        lengths = torch.cat([lengths_of[key] for key in keys])
        indices = torch.cat([ids_of[key] for key in keys])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        factors = torch.cat([factors_of[key] for key in keys]) if weighted else None
        output = self.tbe(indices, offsets, factors)
        upstream = torch.randn(output.shape, generator=draw)
        output.backward(upstream)

        grads = {n: torch.zeros_like(w) for n, w in reference.weights.items()}
        counts = {n: torch.zeros(len(g), dtype=torch.int64) for n, g in grads.items()}
        expected = torch.zeros(output.shape, dtype=torch.float64)
        columns = [self.widths[table] for table in self.features]
        for bag, length in enumerate(lengths.tolist()):
            feature, sample = divmod(bag, batch)
            shard, first = self.shards[self.features[feature]], sum(columns[:feature])
            stored = slice(shard.column_offset, shard.column_offset + columns[feature])
            for i in range(int(offsets[bag]), int(offsets[bag + 1])):
                place = (sample, slice(first, first + columns[feature]))
                if sequence:
                    place = (i, slice(None))
                factor = (float(factors[i]) if weighted else 1.0) / (length if mean else 1)
                expected[place] += factor * reference.weights[shard.table][indices[i], stored]
                grads[shard.table][indices[i], stored] += factor * upstream[place]
                counts[shard.table][indices[i]] += shard.column_offset == 0
        torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)
        reference.step(grads, counts, lr=LR)

    def _feature_of_table(self, position):
        """The table, and which of its features stands at a position."""
        table = self.features[position]
        return self.shards[table].table, self.features[:position].count(table)


def assert_follows(tables, reference):
    for name, weights in tables.whole_tables().items():
        torch.testing.assert_close(weights, reference.weights[name], rtol=1e-4, atol=1e-5)
    assert tables.tbe.row_counts.tolist() == [reference.touched, reference.clipped, 0]


def of_rows(*rows):
    return [TableShard(f"t{i}", n) for i, n in enumerate(rows)]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    dim=st.sampled_from([4, 8]),
    shared=st.booleans(),
    kind=st.sampled_from(["sum", "mean", "sequence"]),
    weighted=st.booleans(),
    batch=st.integers(1, 4),
    keep=st.sampled_from(["all", "touched"]),
    rule=st.sampled_from([Adam(), RowWiseAdam(), Adagrad(), RowWiseAdagrad(), SGD(0.9)]),
    seed=st.integers(0, 2**31),
)
def test_follows_the_equations(rows, dim, shared, kind, weighted, batch, keep, rule, seed):
    draw = torch.Generator().manual_seed(seed)
    features = list(range(len(rows)))
    if shared:
        features.append(features[-1])
    setting = UpdateSettings(rule=rule, l2=1e-4, clip=CLIP, rows=keep)
    pooling = {"sum": PoolingMode.SUM, "mean": PoolingMode.MEAN, "sequence": PoolingMode.NONE}
    tables = Tables(of_rows(*rows), [dim] * len(rows), features, pooling[kind], setting)
    reference = reference_of(tables.fill(draw), setting)
    for _ in range(3):
        # FBGEMM takes weights of samples for pooled lookups only.
        tables.train(
            draw, reference, batch, weighted and kind != "sequence", kind == "mean",
            kind == "sequence",
        )  # fmt: skip
    assert_follows(tables, reference)


@settings(max_examples=25, deadline=None)
@given(
    order=st.permutations([("a", 0), ("a", 4), ("b", 0), ("b", 8), ("c", 0)]),
    columns=st.sampled_from([None, 3, 6]),
    rule=st.sampled_from([Adam(), RowWiseAdam(), RowWiseAdagrad()]),
    seed=st.integers(0, 2**31),
)
def test_column_shards_of_mixed_widths_and_offsets(order, columns, rule, seed):
    """Tables of 12 columns: `a` in 4 + 8, `b` in 8 + 4, `c` whole, in any order in one TBE."""
    draw = torch.Generator().manual_seed(seed)
    rows, width = {"a": 5, "b": 3, "c": 6}, {"a": [4, 8], "b": [8, 4], "c": [12]}
    shards = [TableShard(name, rows[name], column_offset=offset) for name, offset in order]
    widths = [width[name][offset > 0] for name, offset in order]
    clip = CowClip(ratio=0.5, bound=1e-3, columns=columns)
    setting = UpdateSettings(rule=rule, l2=1e-2, clip=clip)
    tables = Tables(shards, widths, list(range(5)), setting=setting, dim=12)
    runs = []
    for shard, columns_here in zip(shards, widths, strict=True):
        if not runs or runs[-1][:2] != [shard.column_offset, columns_here]:
            runs.append([shard.column_offset, columns_here, 0])
        runs[-1][2] += shard.rows
    assert [
        [array.shards[0].column_offset, array.weights.shape[1], len(array.weights)]
        for array in tables.tbe.arrays
    ] == runs
    reference = reference_of(tables.fill(draw), setting)
    for _ in range(3):
        tables.train(draw, reference, batch=3)
    assert_follows(tables, reference)


def one_table(**arguments):
    return Tables(of_rows(5), [4], [0], **arguments).tbe


ID, OFFSETS = torch.tensor([1]), torch.tensor([0, 1])


def test_a_batch_without_ids_still_decays_all_rows():
    tables = one_table(setting=UpdateSettings(l2=1e-2))
    weights = tables.arrays[0].weights.fill_(1.0)
    empty = torch.zeros(0, dtype=torch.int64)
    tables(empty, torch.zeros(3, dtype=torch.int64)).backward(torch.ones(2, 4))
    assert int(tables.step_count) == 1
    assert (weights < 1.0).all()


def test_several_lookups_of_one_backward_are_one_step():
    """Their gradients and counts add up, as if it had been one lookup."""
    results = []
    for lookups in ([[3, 3, 3, 1]], [[3, 1], [3, 3]]):
        tables = one_table()
        tables.arrays[0].weights.fill_(0.1)
        outputs = [tables(torch.tensor(ids), torch.tensor([0, len(ids)])) for ids in lookups]
        sum(output.sum() for output in outputs).backward()
        results.append(tables.arrays[0])
        assert int(tables.step_count) == 1
        assert tables.row_counts[0] == 2
    torch.testing.assert_close(*(array.states["exp_avg"] for array in results))
    assert torch.equal(*(array.weights for array in results))


def test_learning_rate_changes_reach_the_update():
    tables = one_table(lr=0.5)
    tables.set_learning_rate(0.0)
    before_step = tables.arrays[0].weights.clone()
    tables(ID, OFFSETS).backward(torch.ones(1, 4))
    assert torch.equal(tables.arrays[0].weights, before_step)


def test_no_update_without_backward():
    tables = one_table()
    before_step = tables.arrays[0].weights.clone()
    tables(ID, OFFSETS)
    with torch.no_grad():
        assert not tables(ID, OFFSETS).requires_grad
    assert torch.equal(tables.arrays[0].weights, before_step)


def test_fp16_tables_are_looked_up_and_updated_in_place():
    tables = one_table(precision=SparseType.FP16, lr=0.1)
    weights = tables.split_embedding_weights()[0]
    assert weights.dtype == tables.arrays[0].weights.dtype == torch.float16
    assert weights.data_ptr() == tables.arrays[0].weights.data_ptr()
    weights.fill_(0.5)
    output = tables(ID, OFFSETS)
    torch.testing.assert_close(output, torch.full((1, 4), 0.5))
    output.sum().backward()
    # The first step of Adam is lr in size.
    torch.testing.assert_close(weights[1].float(), torch.full((4,), 0.4), atol=1e-3, rtol=0)
    assert {s.dtype for s in tables.arrays[0].states.values()} == {torch.float32}


def test_no_second_copy_of_the_weights_is_made():
    tables = one_table()
    assert tables.weights_tensor().data_ptr() == tables.arrays[0].weights.data_ptr()


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"per_sample_weights": torch.ones(1, requires_grad=True)}, "detach"),
        ({"batch_size_per_feature_per_rank": [[1]]}, "variable batch size"),
    ],
)
def test_what_would_be_wrong_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        one_table()(ID, OFFSETS, **arguments)


def test_prefetching_is_refused():
    with pytest.raises(ValueError, match="TrainPipelineSparseDist"):
        one_table().prefetch(ID, OFFSETS)
