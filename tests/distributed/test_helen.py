"""Helen in sharded tables: the result of the formulas in float64, on any plan."""

from functools import cache

import pytest
import torch

from stampede.optim import Helen
from support.gathering import tables_of
from support.helen_reference import ReferenceHelen
from support.parity import (
    Case,
    Holder,
    build_collection,
    deviation,
    example_loss,
    global_batch,
    local_batch,
    shard,
    sharded_loss,
)
from support.parity_cases import SUMS
from support.ranks import process_group, run_ranks

MIXED = ("data_parallel", "grid_shard", "row_wise", "column_wise")
CASES = [
    Case(plan=plan, tables=SUMS, arguments=arguments)
    for plan, arguments in (
        ("table_wise", {}),
        (MIXED, {"l2": 1e-2, "weight_decay": 1e-3, "columns": 10}),
        (MIXED, {"rows": "touched", "l2": 1e-3}),
        ("grid_shard", {"l2": 1e-2, "columns": 10}),
    )
]
SETTINGS = {"lr": 1e-2, "rho": 0.5, "bound": 0.3}


def train(cases):
    """On every rank: two backward passes a step."""
    results = []
    with process_group():
        for case in cases:
            optimizer = Helen, {**SETTINGS, **case.arguments}
            model = shard(Holder(build_collection(case)), case, optimizer=optimizer)
            start = tables_of(model)
            for step in range(1, case.steps + 1):
                batch = local_batch(case, step)
                for _ in range(2):
                    sharded_loss(case, model, batch).backward()
            results.append((start, tables_of(model)))
    return results


def helen_in_float64(case, start, **changes):
    """The embedding columns as tables, the others as first-order weights."""
    settings = {**SETTINGS, **case.arguments, **changes}
    columns = settings.pop("columns", None) or 12
    touched = settings.pop("rows", "all") == "touched"
    l2 = settings.pop("l2", 0.0)
    parts = {}
    for name in case.names:
        parts[name] = start[name][:, :columns]
        parts[f"{name} rest"] = start[name][:, columns:]
    helen = ReferenceHelen(
        parts,
        tables=tuple(case.names),
        l2=dict.fromkeys(parts, l2),
        touched_only=tuple(parts) if touched else (),
        **settings,
    )
    for step in range(1, case.steps + 1):
        batch = global_batch(case, step)
        counts = {
            name: sum(
                torch.bincount(batch[feature][0], minlength=table.rows)
                for feature in case.features[name]
            )
            for name, table in zip(case.names, case.tables, strict=True)
        }
        counts |= {f"{name} rest": count for name, count in counts.items()}

        def loss(leaves, batch=batch):
            total = 0.0
            for name in case.names:
                whole = torch.cat([leaves[name], leaves[f"{name} rest"]], dim=1)
                for feature in case.features[name]:
                    ids, lengths, _, targets = batch[feature]
                    bags = torch.arange(case.batch).repeat_interleave(lengths)
                    pooled = whole.new_zeros(case.batch, 12).index_add(0, bags, whole[ids])
                    total = total + example_loss(pooled, targets)
            return total / case.batch

        helen.step(loss, counts, step)
    helen.weights = {
        name: torch.cat([helen.weights[name], helen.weights[f"{name} rest"]], dim=1)
        for name in case.names
    }
    return helen


TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=[2, 4], ids=lambda count: f"{count} processes")
def results(request):
    ranks = run_ranks(request.param, train, CASES, ranks_per_node=min(request.param, 2))
    return dict(zip(CASES, ranks[0], strict=True))


START = {}


@cache
def reference(index, **wrong):
    """In float64; every number of processes starts from the same values."""
    return helen_in_float64(CASES[index], START[index], **wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    "index", range(len(CASES)), ids=lambda i: f"{CASES[i].plan} {CASES[i].arguments}"
)
def test_follows_the_formulas_on_any_plan(results, index):
    case = CASES[index]
    found, weights = results[case]
    start = START.setdefault(index, found)
    assert all(start[name].equal(found[name]) for name in start)
    assert deviation(start, weights, reference(index)) < TOLERANCE
    for wrong in ({"rho": 0.0}, {"bound": 1.0}):
        assert deviation(start, weights, reference(index, **wrong)) > 10 * TOLERANCE
