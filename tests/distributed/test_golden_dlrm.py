"""TorchRec's golden training example (examples/golden_training), with the two lines changed."""

from support.ranks import run_ranks
from support.torchrec_models import GOLDEN_RANKS, train_golden


def test_the_golden_example_follows_the_equations():
    (exact, without_clip), _ = run_ranks(GOLDEN_RANKS, train_golden, ("fp32", "fp32"))
    assert exact < 1e-4
    assert without_clip > 0.3
