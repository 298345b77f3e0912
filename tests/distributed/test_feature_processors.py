"""Position weights get the exact gradient, which TorchRec's default sharders give them too."""

import pytest
import torch

from support.parity_cases import PLANS
from support.processors import case_of, reference, train_all
from support.ranks import run_ranks

pytestmark = pytest.mark.slow

CASES = [case_of(plan, "touched") for plan in PLANS] + [case_of("row_wise", "all")]


@pytest.mark.parametrize("count", [1, 2])
def test_position_weights_and_tables_behind_them_follow_float64(count):
    results = run_ranks(count, train_all, CASES)[0]
    for case, (ours, beside, theirs) in zip(CASES, results, strict=True):
        expected = reference(case)
        for name, grad in expected["grads"].items():
            assert float(grad.abs().max()) > 1e-3
            for found in (ours, beside, theirs):
                torch.testing.assert_close(
                    found["grads"][name].double(), grad, rtol=1e-4, atol=1e-5
                )
        for name, value in expected["end"].items():
            torch.testing.assert_close(ours["end"][name].double(), value, rtol=1e-4, atol=1e-5)
