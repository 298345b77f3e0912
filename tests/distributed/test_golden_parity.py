"""The authors' code, and TorchRec's golden example, are followed on several processes too."""

import pytest

from support.golden import TOLERANCE, train_with_the_engine
from support.paths import shared
from support.ranks import run_ranks
from support.torchrec_models import GOLDEN_RANKS, train_golden


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "name, sharding_type", [("deepfm", "table_row_wise"), ("deepfm_bound", "row_wise")]
)
def test_two_processes(name, sharding_type):
    path = shared(f"golden/largebatchctr_{name}.npz")
    trajectories = run_ranks(2, train_with_the_engine, path, f"sharding.plan={sharding_type}")
    assert trajectories[0].plan == {sharding_type}
    assert trajectories[0].worst < TOLERANCE
    # Both ranks own rows and both clip some.
    assert all(trajectory.touched > 0 for trajectory in trajectories)


@pytest.mark.slow
def test_torchrecs_golden_training_follows_the_equations():
    """Its examples/golden_training, with the two lines changed."""
    (exact, without_clip), _ = run_ranks(GOLDEN_RANKS, train_golden, ("fp32", "fp32"))
    assert exact < 1e-4
    assert without_clip > 0.3
