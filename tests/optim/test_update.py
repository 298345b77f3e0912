"""The update of tables, whole or in parts, against the equations in plain float64 PyTorch."""

import copy
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.distributed.types import ShardingEnv

from stampede.optim import CowClip, NonFiniteGradientError, Rule
from stampede.optim.backends import choose_backend
from stampede.optim.backends import torch as torch_backend
from stampede.optim.rows import sum_by_row
from stampede.optim.rules import SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam
from stampede.optim.sharded.reduction import CollectionGroups
from stampede.optim.table_array import PendingUpdate, TableArray, TableShard
from stampede.optim.update import update_
from stampede.optim.update_settings import UpdateSettings
from support.updated_tables import reference_of

EVERY_RULE = [
    *(Adam(), Adam((0.0, 0.5), 1e-3, "torch")),
    *(RowWiseAdam(), RowWiseAdam((0.5, 0.9), 1e-3, "torch")),
    *(Adagrad(), Adagrad(1e-2)),
    *(RowWiseAdagrad(), RowWiseAdagrad(1e-2)),
    *(SGD(), SGD(0.9)),
]
CLIPS = [
    CowClip("none"),
    CowClip("row", threshold=0.02),
    CowClip("cowclip", ratio=0.1, bound=1e-3),
]
by_granularity = {"argvalues": CLIPS, "ids": lambda clip: clip.granularity}


@st.composite
def clips(draw):
    granularity = draw(st.sampled_from([clip.granularity for clip in CLIPS]))
    return CowClip(
        granularity,
        ratio=draw(st.sampled_from([0.01, 0.5, 1.0])),
        bound=draw(st.sampled_from([0.0, 1e-5, 0.05])),
        variant=draw(st.sampled_from(["reference", "paper"])),
        columns=draw(st.sampled_from([None, 1, 2, 3])),
        threshold=draw(st.sampled_from([1e-3, 0.1, 10.0])) if granularity == "row" else None,
    )


all_settings = st.builds(
    UpdateSettings,
    rule=st.sampled_from(EVERY_RULE),
    clip=clips(),
    # With 1e-2 and ratio 0.01, and with 3, the decay itself is clipped, also in absent rows.
    l2=st.sampled_from([0.0, 1e-5, 1e-2, 3.0]),
    weight_decay=st.sampled_from([0.0, 0.5]),
    rows=st.sampled_from(["all", "touched"]),
)


class Parts:
    """Tables cut by rows and columns into several arrays of one process.

    Args:
        tables: by name, `[rows, dim]`; all of one width.
        row_cuts, column_cuts: by name, where each table is cut.
        spread: number of arrays that pieces of one kind are dealt to.
    """

    def __init__(self, tables, settings, row_cuts=None, column_cuts=None, spread=1):
        self.tables = {name: table.clone() for name, table in tables.items()}
        pieces = defaultdict(list)
        split_blocks = {}
        for name, table in tables.items():
            rows = sorted({0, *(row_cuts or {}).get(name, ()), len(table)})
            columns = sorted({0, *(column_cuts or {}).get(name, ()), table.shape[1]})
            for position, (first, stop) in enumerate(pairwise(rows)):
                for left, right in pairwise(columns):
                    shard = TableShard(name, stop - first, first, left)
                    pieces[left, right, position % spread].append(shard)
                if len(columns) > 2:
                    split_blocks[name, first] = (0,)
        self.arrays = []
        for (left, right, _), shards in pieces.items():
            parts = [tables[s.table][s.row_offset : s.row_offset + s.rows] for s in shards]
            weights = torch.cat(parts)[:, left:right].contiguous()
            dim = next(iter(tables.values())).shape[1]
            self.arrays.append(TableArray.create(shards, weights, settings, dim))
        self.groups = CollectionGroups(
            split_blocks,
            dict.fromkeys(tables, settings),
            ShardingEnv.from_local(1, 0),
            torch.device("cpu"),
        )

    def step(self, occurrences, lr, step):
        """One update from `(ids, gradients)` of each table's occurrences."""
        updates = []
        for array in self.arrays:
            ids, grads = [], []
            left, columns = array.shards[0].column_offset, array.weights.shape[1]
            for shard, start in zip(array.shards, array.starts, strict=False):
                rows, values = occurrences[shard.table]
                here = (rows >= shard.row_offset) & (rows < shard.row_offset + shard.rows)
                ids.append(rows[here] - shard.row_offset + start)
                grads.append(values[here, left : left + columns])
            batch = sum_by_row(torch.cat(ids), torch.cat(grads))
            updates.append(PendingUpdate(choose_backend(array), batch, lr, step))
        row_counts = sum(update_(updates, [self.groups])).tolist()
        return dict(zip(("touched", "clipped", "skipped"), row_counts, strict=True))

    def gathered(self, pick=lambda array: array.weights):
        """What `pick` returns for each array, as whole tables."""
        whole = {name: torch.full_like(t, torch.nan) for name, t in self.tables.items()}
        for array in self.arrays:
            for shard, start in zip(array.shards, array.starts, strict=False):
                rows = slice(shard.row_offset, shard.row_offset + shard.rows)
                values = pick(array)[start : start + shard.rows]
                if values.ndim == 1:
                    if shard.column_offset == 0:
                        whole[shard.table][rows] = values[:, None]
                else:
                    columns = slice(shard.column_offset, shard.column_offset + values.shape[1])
                    whole[shard.table][rows, columns] = values
        return whole

    def tensors(self):
        return [tensor for array in self.arrays for tensor in array.all_tensors()]


def random_tables(draw, sizes, dim):
    """Row norms over four decades: some rows are clipped, some are not."""
    tables = {}
    for i, rows in enumerate(sizes):
        scale = 10.0 ** -torch.randint(0, 4, (rows, 1), generator=draw)
        table = torch.randn(rows, dim, generator=draw, dtype=torch.float64) * scale
        tables[f"t{i}"] = table
    return tables


def random_batch(draw, tables, occurrences):
    """Ids that repeat, with gradients over three decades."""
    batch = {}
    for name, table in tables.items():
        ids = torch.randint(0, len(table), (occurrences,), generator=draw)
        grads = torch.randn(occurrences, table.shape[1], generator=draw, dtype=torch.float64)
        batch[name] = (ids, grads * 10.0 ** -torch.randint(0, 4, (occurrences, 1), generator=draw))
    return batch


def dense(batch, tables):
    """Gradients of whole tables, and counts."""
    grads = {n: torch.zeros_like(t).index_add_(0, *batch[n]) for n, t in tables.items()}
    return grads, {n: torch.bincount(batch[n][0], minlength=len(t)) for n, t in tables.items()}


def assert_same(found, expected, rtol=1e-6, atol=1e-10):
    for name, table in expected.items():
        torch.testing.assert_close(found[name], table, rtol=rtol, atol=atol)


def assert_follows(setting, tables, cuts, spread, draw, occurrences):
    """Train a few steps, one of them without ids, and compare weights, states and counts."""
    row_cuts = {n: {c for c in cuts[0] if c < len(t)} for n, t in tables.items()}
    # The first table stays whole in its columns, so that arrays of both kinds meet.
    column_cuts = {n: {c for c in cuts[1] if c < t.shape[1]} for n, t in list(tables.items())[1:]}
    parts = Parts(tables, setting, row_cuts, column_cuts, spread)
    reference = reference_of(tables, setting)
    outcome = Counter()
    for step, here in enumerate(occurrences, 1):
        batch = random_batch(draw, tables, here)
        outcome.update(parts.step(batch, lr=1e-2 / step, step=step))
        reference.step(*dense(batch, tables), lr=1e-2 / step)
    assert_same(parts.gathered(), reference.weights)
    assert outcome == {"touched": reference.touched, "clipped": reference.clipped, "skipped": 0}
    first, second = reference.first, reference.second
    expected = {"exp_avg": first, "momentum_buffer": first, "exp_avg_sq": second, "sum": second}
    for name, state in parts.arrays[0].states.items():
        target = expected[name.removesuffix("_rest")]
        if state.ndim == 1:
            column = -1 if name.endswith("_rest") else 0
            target = {n: t[:, [column]].expand_as(t) for n, t in target.items()}
        assert_same(parts.gathered(lambda array, n=name: array.states[n]), target)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    setting=all_settings,
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    dim=st.integers(3, 6),
    cuts=st.tuples(st.sets(st.integers(1, 8)), st.sets(st.integers(1, 5))),
    spread=st.integers(1, 2),
    occurrences=st.sampled_from([0, 1, 3, 12]),
    block=st.sampled_from([7, 1 << 20]),
    seed=st.integers(0, 2**31),
)
def test_any_tables_in_any_parts_follow_the_equations(
    setting, sizes, dim, cuts, spread, occurrences, block, seed
):
    draw = torch.Generator().manual_seed(seed)
    tables = random_tables(draw, sizes, dim)
    steps = [occurrences, occurrences, 0, occurrences]
    # Elements of which a sweep of all rows makes one block.
    with mock.patch.object(torch_backend, "BLOCK_ELEMENTS", block):
        assert_follows(setting, tables, cuts, spread, draw, steps)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("clip", **by_granularity)
def test_a_gradient_that_is_not_finite_changes_nothing(clip, bad):
    draw = torch.Generator().manual_seed(0)
    tables = random_tables(draw, [9, 6], 4)
    setting = UpdateSettings(clip=clip, l2=1e-2, weight_decay=0.1)
    parts = Parts(tables, setting, {"t0": {4}}, {"t0": {1, 3}}, spread=2)
    parts.step(random_batch(draw, tables, 6), 1e-2, 1)
    batch = random_batch(draw, tables, 6)
    batch["t0"][1][2, 3] = bad
    before = copy.deepcopy(parts.tensors())
    words = "no table of its collection was changed.*skip_row"
    with pytest.raises(NonFiniteGradientError, match=words):
        parts.step(batch, 1e-2, 2)
    assert all(map(torch.equal, parts.tensors(), before))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("column", [0, 3])
@pytest.mark.parametrize("clip", **by_granularity)
@pytest.mark.parametrize("rows", ["all", "touched"])
def test_a_row_that_is_skipped_is_absent(rows, clip, column, bad):
    """A NaN in one column shard takes the row out of all of them."""
    draw = torch.Generator().manual_seed(0)
    tables = random_tables(draw, [9, 6], 4)
    clip = replace(clip, columns=3)
    setting = UpdateSettings(
        clip=clip, l2=1e-2, rule=RowWiseAdam(), rows=rows, on_nonfinite="skip_row"
    )
    batch = random_batch(draw, tables, 8)
    ids, grads = batch["t0"]
    ids[:3] = 5
    grads[1, column] = bad
    without = {**batch, "t0": (ids[ids != 5], grads[ids != 5])}
    results, outcomes = [], []
    for given_batch in (batch, without):
        parts = Parts(tables, setting, {"t0": {4}}, {"t0": {1, 3}})
        outcomes.append(parts.step(given_batch, 1e-2, 1))
        results.append(parts.tensors())
    assert all(map(torch.equal, *results))
    assert outcomes[0] == {**outcomes[1], "skipped": 1}


@pytest.mark.parametrize("clip", **by_granularity)
@pytest.mark.parametrize("rows", ["all", "touched"])
@pytest.mark.parametrize("rule", EVERY_RULE[1::2], ids=repr)
def test_a_frozen_row_stays_and_the_others_move_as_without_it(rule, rows, clip):
    frozen, setting = 3, UpdateSettings(rule=rule, clip=clip, l2=0.3, weight_decay=0.1, rows=rows)
    draw = torch.Generator().manual_seed(0)
    tables = random_tables(draw, [7], 4)
    tables["t0"][frozen] = 50.0
    others = [i for i in range(7) if i != frozen]
    parts = Parts(tables, setting)
    parts.arrays[0].frozen_row = frozen
    reference = reference_of({"t0": tables["t0"][others]}, setting)
    touched = 0
    for step in (1, 2, 3):
        batch = random_batch(draw, tables, 8)
        batch["t0"][0][:2] = frozen
        # Not even a gradient that is not finite matters there.
        batch["t0"][1][0] = float("nan")
        touched += parts.step(batch, 1e-2, step)["touched"]
        grads, counts = dense(batch, tables)
        reference.step({"t0": grads["t0"][others]}, {"t0": counts["t0"][others]}, lr=1e-2)
    assert_same({"t0": parts.gathered()["t0"][others]}, reference.weights)
    assert touched == reference.touched
    array = parts.arrays[0]
    assert torch.equal(array.weights[frozen], tables["t0"][frozen])
    assert all(bool((state[frozen] == 0).all()) for state in array.states.values())


def test_copies_are_counted_once():
    """Of a replicated table every rank has a copy, and counts its rows if it is the first."""
    draw = torch.Generator().manual_seed(0)
    tables = random_tables(draw, [6], 4)
    batch = random_batch(draw, tables, 5)
    updates = []
    for counted in (True, False):
        shard = TableShard("t0", 6, counted=counted)
        array = TableArray.create([shard], tables["t0"].clone(), UpdateSettings(), 4)
        updates.append(PendingUpdate(choose_backend(array), sum_by_row(*batch["t0"]), 1e-2, 1))
    assert [int(touched > 0) for touched, *_ in update_(updates)] == [1, 0]
    first, second = (update.array.weights for update in updates)
    assert torch.equal(first, second) and not torch.equal(first, tables["t0"])


def test_memory_of_the_sweep_does_not_grow_with_the_table():
    """No gradient of the table's size is made."""
    rows, dim = 1_000_000, 12
    weights = torch.zeros(rows, dim)
    array = TableArray.create([TableShard("t", rows)], weights, UpdateSettings(l2=1e-5), dim)
    batch = sum_by_row(torch.tensor([5]), torch.ones(1, dim))
    with torch.profiler.profile(profile_memory=True) as profile:
        update_([PendingUpdate(choose_backend(array), batch, lr=1e-3, step=1)])
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())
    assert 0 < allocated < weights.nbytes / 4


@dataclass(frozen=True)
class Seen(Rule):
    """A rule of a user's own: steps shrink with how often an id has occurred so far."""

    row_states = ("seen",)

    def step_(self, rows):
        seen = rows.states["seen"].add_(rows.counts)
        rows.weights.sub_(rows.grads / seen.clamp_min(1).sqrt()[:, None], alpha=rows.lr)


@pytest.mark.parametrize("rows", ["all", "touched"])
def test_a_state_of_rows_may_depend_on_their_counts(rows):
    """Also of rows whose columns lie in several arrays, each of which sees the counts."""
    draw = torch.Generator().manual_seed(0)
    tables = random_tables(draw, [9, 6], 4)
    setting = UpdateSettings(rule=Seen(), clip=CowClip("none"), l2=0.1, rows=rows)
    parts = Parts(tables, setting, {"t0": {4}}, {"t1": {1, 3}}, spread=2)
    expected = {name: table.clone() for name, table in tables.items()}
    seen = {name: torch.zeros(len(table), dtype=torch.float64) for name, table in tables.items()}
    for step in range(1, 4):
        batch = random_batch(draw, tables, 8)
        parts.step(batch, 1e-2, step)
        grads, counts = dense(batch, tables)
        for name, weights in expected.items():
            seen[name] += counts[name]
            taking_part = counts[name] > 0 if rows == "touched" else counts[name] >= 0
            of_rows = (grads[name] + 0.2 * weights) / seen[name].clamp_min(1).sqrt()[:, None]
            weights[taking_part] -= 1e-2 * of_rows[taking_part]
    assert_same(parts.gathered(), expected)
    states = parts.gathered(lambda array: array.states["seen"])
    first = {name: one[:, :1] for name, one in states.items()}
    assert_same(first, {name: one[:, None] for name, one in seen.items()})
