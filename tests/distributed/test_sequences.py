"""Sequence embeddings (`EmbeddingCollection`) against plain float64 PyTorch, on every plan."""

import pytest

from support.parity import Case, Table, run_cases
from support.parity_reference import deviation, state_deviation, train_reference
from support.ranks import run_ranks

# TorchRec: all tables of an EmbeddingCollection have the same width.
TABLES = (Table(40), Table(23, features=2), Table(1), Table(60))
PLAN = ("row_wise", "column_wise", "table_wise", "data_parallel")
CASES = [Case(PLAN, TABLES, sequence=True, steps=8)]
ODD = tuple(Table(rows, 6, features, columns=(2, 2, 2)) for rows, features in ((40, 1), (23, 2)))
CASES += [
    *(Case(plan, ODD, sequence=True, steps=8) for plan in ("row_wise", "column_wise")),
    Case("column_wise", TABLES, rule="rowwise_adam", sequence=True, steps=8),
    Case("row_wise", TABLES, rule="adagrad", sequence=True, steps=8, arguments={"rows": "touched"}),
]


@pytest.fixture(scope="module", params=[1, 2])
def results(request):
    """Of every case, on so many ranks."""
    return request.param, run_ranks(request.param, run_cases, CASES)[0]


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"{CASES[i].plan}-{i}")
def test_sequences_follow_the_equations(results, index):
    world_size, found = results
    case, result = CASES[index], found[index]
    assert result["plan"] == {name: case.sharding_of(name) for name in case.names}
    pieces = {name: len(shards) for name, shards in result["shards"].items()}
    for name in case.names:
        kind = case.sharding_of(name)
        if kind == "column_wise":
            assert pieces[name] == 3
        if kind == "row_wise":
            assert pieces[name] == world_size
    start = result["start"]
    reference = train_reference(case, start)
    assert deviation(case, start, result["weights"], reference) < 1e-4
    assert state_deviation(case, result["states"], reference) < 1e-4
    assert result["counts"] == [reference.touched, reference.clipped, 0]
    assert 0.2 < reference.clipped / reference.touched < 0.8
    assert reference.largest_count > 3
    # The counts matter, and the test sees it.
    wrong = train_reference(case, start, force_counts=1)
    assert deviation(case, start, result["weights"], wrong) > 1e-2
