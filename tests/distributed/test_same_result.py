"""Any number of ranks and any plan give the losses and weights of one process.

With `train.reproducible` to the last bit, in float64 to 1e-10, and else nearly.
"""

from functools import partial

import pytest
import torch

from stampede.engine.checkpoint.retention import newest
from stampede.engine.processes import processes
from stampede.engine.step import add_tile, average_gradients_, sum_over_ranks
from support.in_float64 import compute_in_float64
from support.jobs import assert_same_training, losses_and_weights, run_small, same_end, tensors_of
from support.ranks import run_ranks
from support.reading import prepared, run_prepared
from support.stopping import stopped_on_last_rank, undisturbed_runs


def run_in_float64(*arguments):
    """See `run_small`."""
    compute_in_float64()
    return run_small(*arguments)


def stopped_in_float64(*arguments):
    """See `stopped_on_last_rank`."""
    compute_in_float64()
    return stopped_on_last_rank(*arguments)


pytestmark = pytest.mark.slow


# Last training batches of 256 (full) and 3 = ranks + 1 samples.
@pytest.mark.slow
@pytest.mark.parametrize("plan, rows", [("table_row_wise", 1795), ("auto", 1792)])
def test_two_ranks(tmp_path, plan, rows):
    overrides = [f"data.rows={rows}", "evaluate.select_on=test", "data.test_rows=259"]
    alone = losses_and_weights(tmp_path, overrides)
    assert alone.evaluation["samples"] == 259
    together = run_ranks(2, losses_and_weights, tmp_path, [*overrides, f"sharding.plan={plan}"], 2)
    assert_same_training(alone, together[0])
    assert together[0].losses == together[1].losses
    if plan != "auto":
        assert together[0].plan == {plan}


@pytest.mark.wide
def test_lower_precision_between_ranks(tmp_path):
    at = "sharding.communication"
    overrides = ["data.rows=1024", "model.dim=10", "sharding.plan=row_wise"]
    exact, rounded = (
        run_ranks(2, losses_and_weights, tmp_path, [*overrides, *more], 2)[0].losses
        for more in ([], [f"{at}.forward=fp16", f"{at}.backward=bf16"])
    )
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=1e-3)


# The last batch has 5 samples, so that some tiles are empty.
REPRODUCIBLE = [
    "data.rows=3333", "model.hidden=[64,64]", "evaluate.every=5",
    "train.reproducible=true",
]  # fmt: skip
DROPOUT = "model.dropout=0.2"
OFF = "train.reproducible=false"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A function that gives the run folder of one process by further overrides."""
    return partial(undisturbed_runs(tmp_path_factory, REPRODUCIBLE), 1)


@pytest.mark.wide
def test_reproducible_runs_end_with_the_same_bits(tmp_path, alone):
    given = [*REPRODUCIBLE, "sharding.plan=row_wise"]
    run_ranks(4, run_small, tmp_path, given, 4, ranks_per_node=2)
    same_end(tmp_path / "small", alone())


def test_reproducible_runs_go_on_with_other_ranks(tmp_path, alone):
    given = [*REPRODUCIBLE, DROPOUT, "checkpoint.resume=auto"]
    said = run_ranks(4, stopped_on_last_rank, tmp_path, given, 4, 9)
    assert len(set(said)) == 1 and "after step 9" in said[0]
    run_ranks(2, run_small, tmp_path, [*given, "sharding.plan=row_wise"], 2)
    same_end(tmp_path / "small", alone(DROPOUT))


def test_weights_and_bags_are_reproducible_too(tmp_path):
    data = prepared(tmp_path / "data", single=3, multi=2, weight=True)
    given = ["train.reproducible=true", "sharding.plan=row_wise"]
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        run_ranks(ranks, run_prepared, folder, data, given, ranks)
    same_end(tmp_path / "2/small", tmp_path / "1/small")


# Of the largest value of a tensor.
EXACT = 1e-10


@pytest.mark.parametrize("samples", [1333, pytest.param(80_000, marks=pytest.mark.soak)])
def test_in_float64_all_ranks_agree(tmp_path, samples):
    """Whatever float32 rounds is no fault of the exchange: nothing is lost or counted twice."""
    given = [*REPRODUCIBLE, OFF, DROPOUT, f"data.rows={samples}", "data.scale=1e-4"]
    given.append("checkpoint.resume=auto")
    ends = {}
    for name, ranks in (("alone", 1), ("four", 4), ("stopped", 1)):
        folder = tmp_path / name
        folder.mkdir()
        if name == "stopped":
            rows = [*given, "sharding.plan=row_wise"]
            said = run_ranks(2, stopped_in_float64, folder, rows, 2, 3)
            assert "after step 3" in said[0]
        run_ranks(ranks, run_in_float64, folder, [*given, "sharding.plan=table_wise"], ranks)
        ends[name] = tensors_of(newest(folder / "small/checkpoints"))
    alone = ends.pop("alone")
    assert all(tensor.dtype == torch.float64 for name, tensor in alone.items() if "exp_avg" in name)
    for name, end in ends.items():
        assert end.keys() == alone.keys()
        for key, tensor in alone.items():
            bound = EXACT * float(tensor.abs().max())
            assert torch.allclose(end[key], tensor, rtol=0, atol=bound), (name, key)


def averaged_gradients():
    """Means over two ranks, of which each gives a gradient to another one of three parameters."""
    with processes("cpu") as here:
        parameters = [torch.nn.Parameter(torch.ones(size)) for size in (2, 3, 4)]
        (parameters[here.rank].sum() * 4).backward()
        average_gradients_(parameters, here.world_size)
    return [parameter.grad for parameter in parameters]


def test_ranks_may_give_gradients_to_different_parameters():
    for of_rank in run_ranks(2, averaged_gradients):
        assert [grad.tolist() for grad in of_rank] == [[2.0] * 2, [2.0] * 3, [0.0] * 4]


def sums_in_order():
    """Sums over 8 tiles on some ranks, in their tree and one after the other."""
    # No multiple of the ranks.
    tiles = torch.randn(8, 1001, generator=torch.Generator().manual_seed(3))
    with processes("cpu") as here:
        sums = []
        for number, tile in enumerate(tiles.clone().chunk(here.world_size)[here.rank], 1):
            add_tile(sums, number, [tile])
        ((mine,),) = sums
        if here.world_size > 1:
            mine = sum_over_ranks(mine, here.world_size, in_order=True)
    one_by_one = torch.zeros(1001)
    for tile in tiles:
        one_by_one += tile
    return mine, one_by_one


def test_sums_of_tiles_have_the_same_bits_on_any_number_of_ranks():
    alone, in_another_order = run_ranks(1, sums_in_order)[0]
    # The sums depend on the order, so that the same bits are no accident.
    assert not torch.equal(alone, in_another_order)
    for ranks in (2, 4):
        for found, _ in run_ranks(ranks, sums_in_order):
            assert torch.equal(found, alone)
