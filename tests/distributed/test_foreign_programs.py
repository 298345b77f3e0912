"""Other people's programs read and write tables, evict rows and set what TorchRec lets them set."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.distributed.model_tracker.types import TrackingMode

from stampede.optim import local_cowclip_tables
from support.foreign import Foreign, foreign_in_reference, run_without_division
from support.gathering import states_of
from support.parity import (
    Case,
    Holder,
    Table,
    assert_follows,
    build_collection,
    deviation,
    global_batch,
    reference_of,
    run_cases,
    shard,
    start_of,
    train,
)
from support.parity_cases import PLANS
from support.ranks import process_group, run_ranks

pytestmark = pytest.mark.slow

# Of the first, rows wait for their steps, also where each of two processes has a half of it.
TABLES = (Table(1 << 17, dim=8), Table(40, dim=8, features=2))
CASES = [
    Case(plan, TABLES, arguments={"rows": rows}, steps=9, way=None)
    for rows, plans in (("all", PLANS), ("touched", ("data_parallel", "row_wise")))
    for plan in plans
]
ODD = (Table(1 << 17, dim=10, columns=(5, 5)), Table(40, dim=7, features=2))
LARGE = [replace(case, steps=3) for case in CASES[:4]]
CASES += [
    replace(case, tables=ODD)
    for case in CASES
    if (case.plan, case.arguments["rows"]) in (("column_wise", "all"), ("row_wise", "touched"))
]
SMALL = [replace(case, tables=case.tables[1:], steps=5, way="waiting") for case in CASES]


# On one process what is replicated or split is not.
ON = {2: CASES, 1: CASES[:2]}


@cache
def touched_by_others(count):
    ranks = run_ranks(count, run_cases, ON[count], Foreign())
    return dict(zip(ON[count], ranks[0], strict=True))


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "count, case",
    [
        pytest.param(count, case, id=f"{count}-{case.plan}-{case.arguments['rows']}")
        for count, cases in ON.items()
        for case in cases
    ],
)
def test_reads_writes_evictions_and_set_steps_are_exact(count, case):
    found = touched_by_others(count)[case]
    assert_follows(case, found, meanwhile=foreign_in_reference)
    untouched = reference_of(case)
    assert deviation(start_of(case, found), found["weights"], untouched) > 0.1


def test_gradients_that_are_not_divided_are_so_on_every_plan():
    cases = SMALL[: len(PLANS)]
    results = run_ranks(2, run_without_division, cases)[0]
    for case, found in zip(cases, results, strict=True):
        assert_follows(case, found, gradient_factor=2)
        divided = reference_of(case)
        assert deviation(start_of(case, found), found["weights"], divided) > 0.01


@pytest.mark.cases(1)
@pytest.mark.parametrize("count", [2, 1, 4])
def test_gradients_and_counts_of_several_passes_add_up(count):
    cases = {1: SMALL[:2], 2: [*LARGE, *SMALL], 4: SMALL[:4]}[count]
    results = run_ranks(count, run_cases, cases, None, 4)[0]
    for case, found in zip(cases, results, strict=True):
        expected = assert_follows(case, found)
        assert found["counts"][:2] == [expected.touched, expected.clipped]


def run_tracked(cases):
    """By case, states before and after steps 3 and 4, and what TorchRec's tracker tells of them.

    It tells of this rank's rows, by table: their numbers in the whole table, and differences.
    """
    results = []
    with process_group():
        for case in cases:
            model = shard(Holder(build_collection(case)), case)
            train(case, model, [1, 2])
            before = states_of(model)
            tracker = ModelDeltaTrackerTrec(model, mode=TrackingMode.MOMENTUM_DIFF)
            for step in (3, 4):
                train(case, model, [step])
                tracker.step()
            arrays = [array for tbe in local_cowclip_tables(model) for array in tbe.arrays]
            shards = {s.table.split(".")[-1]: s for array in arrays for s in array.shards}
            told = {path.split(".")[-1]: rows for path, rows in tracker.get_unique().items()}
            told = {n: (r.ids + shards[n].row_offset, r.states) for n, r in told.items()}
            results.append((before, states_of(model), told))
    return results


def test_every_rank_tracks_what_its_rows_add_to_their_squared_gradients():
    cases = [
        Case(plan, (Table(40, 8), Table(23, 8, features=2)), "rowwise_adagrad", {"rows": "touched"})
        for plan in ("table_wise", "row_wise")
    ]
    for case, *ranks in zip(cases, *run_ranks(2, run_tracked, cases), strict=True):
        before, after, _ = ranks[0]
        for table, features in case.features.items():
            told = [found[table] for _, _, found in ranks if table in found]
            ids, states = (torch.cat(parts) for parts in zip(*told, strict=True))
            steps = (global_batch(case, step) for step in (3, 4))
            used = torch.cat([batch[feature][0] for batch in steps for feature in features])
            assert torch.equal(ids.sort().values, used.unique())
            sums = [whole[table]["momentum1"][ids] for whole in (before, after)]
            torch.testing.assert_close(states.double(), sums[1] - sums[0], rtol=1e-5, atol=1e-6)
            assert float(states.max()) > 0.01
