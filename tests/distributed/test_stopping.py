"""Signals to one rank of several, and runs that go on with other numbers of ranks and plans."""

import pytest
import torch

from stampede.engine.checkpoint import newest, read_manifest
from stampede.engine.tables import read_field
from support.jobs import run_small, without_times
from support.ranks import run_ranks
from support.stopping import stopped_on_rank_1

LONG = ["train.epochs=2", "evaluate.every=3", "sharding.plan=row_wise"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    run_ranks(2, run_small, folder, LONG, 2)
    return folder / "small"


def weights(run, field):
    return read_field(newest(run / "checkpoints"), field)


@pytest.mark.parametrize("plan, ranks", [("row_wise", 2), ("column_wise", 4), ("table_wise", 1)])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path, undisturbed, plan, ranks):
    said = run_ranks(2, stopped_on_rank_1, tmp_path, LONG, 2, 5)
    assert len(set(said)) == 1 and "SIGTERM after step 5" in said[0]
    assert read_manifest(newest(tmp_path / "small/checkpoints")).progress.step == 5
    overrides = [*LONG[:2], f"sharding.plan={plan}", "checkpoint.resume=auto"]
    if ranks == 1:
        run_small(tmp_path, overrides)
    else:
        run_ranks(ranks, run_small, tmp_path, overrides, ranks)
    same = plan == "row_wise"
    if same:
        assert without_times(tmp_path / "small") == without_times(undisturbed)
    for field in ("C1", "C2"):
        for one, other in zip(
            weights(tmp_path / "small", field), weights(undisturbed, field), strict=True
        ):
            # Else sums over ranks are rounded in another order.
            bound = 0 if same else 2e-5 * float(other.abs().max())
            assert torch.allclose(one, other, rtol=0, atol=bound)
