"""TorchRec's golden training example (examples/golden_training), with the two lines changed."""

import pytest

from support.golden_dlrm import RANKS, train_golden
from support.ranks import run_ranks


@pytest.mark.parametrize(
    "precisions, tolerance", [(("fp32", "fp32"), 1e-4), (("fp16", "bf16"), 0.03)]
)
def test_the_golden_example_follows_the_equations(precisions, tolerance):
    (exact, without_clip), _ = run_ranks(RANKS, train_golden, precisions)
    assert exact < tolerance
    assert without_clip > 0.3
    if precisions != ("fp32", "fp32"):
        # The precision is used.
        assert exact > 1e-4
