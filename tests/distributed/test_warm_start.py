"""Weights go to the same rows whatever plan wrote them and whatever plan reads them."""

import pytest
import torch

from stampede.engine.processes import processes
from support.jobs import tensors_of
from support.movie_runs import train_on_movies
from support.ranks import run_ranks
from support.warm_starts import begun, begun_in, movie_folder

pytestmark = pytest.mark.slow

# Processes and plans that write, and those that read what each of them has written.
SAVED = [(2, "column_wise"), (4, "row_wise")]
READ = {
    2: {4: ["table_row_wise", "grid_shard", "row_wise", "auto"]},
    4: {2: ["table_wise", "column_wise", "data_parallel"]},
}
# Row-wise Adam has states of both kinds, with a value for each element and for each row.
SETTINGS = ["optim.embedding.optimizer=rowwise_adam", "model.dim=16"]
GROWN = 900


def train(folder, plan, world_size):
    train_on_movies(folder, *SETTINGS, f"sharding.plan={plan}", world_size=world_size)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def begun_one_after_another(cases, plans, world_size):
    """What `begun` gives for each case and plan; as a rank of several."""
    with processes("cpu") as here:
        return [
            begun_in(here, folder, [*overrides, f"sharding.plan={plan}"], f"{plan}-{world_size}")
            for plan in plans
            for folder, overrides in cases
        ]


@pytest.fixture(scope="module", params=SAVED, ids=lambda saved: f"{saved[1]}-{saved[0]}")
def saved(request, tmp_path_factory):
    ranks, plan = request.param
    folder = movie_folder(tmp_path_factory.mktemp("saved") / "movies")
    # Four processes are two nodes of two, or table-row-wise and grid never cross nodes.
    run_ranks(ranks, train, folder, plan, ranks, ranks_per_node=2)
    return ranks, folder / "movies"


@pytest.mark.cases(1)
def test_any_plan_reads_what_any_plan_wrote(saved, tmp_path):
    """New runs, whose log has grown."""
    by, saved = saved
    folder = movie_folder(tmp_path / "new", GROWN)
    cases = [(folder, [*SETTINGS, f"checkpoint.init_from={saved}", "run.seed=7"])]
    path, _, expected = begun(*cases[0])
    whole = tensors_of(path)
    assert any(tensor.any() for tensor in whole.values())
    for ranks, plans in READ[by].items():
        results = run_ranks(ranks, begun_one_after_another, cases, plans, ranks, ranks_per_node=2)
        for path, _, report in results[0]:
            assert same(tensors_of(path), whole), path
            assert report == expected
        assert all([r[1:] for r in of_rank] == [r[1:] for r in results[0]] for of_rank in results)
