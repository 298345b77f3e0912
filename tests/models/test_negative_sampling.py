"""Correction of scores for left-out negatives, against probabilities counted in float64."""

import numpy as np
import pytest
import torch

from stampede.models.negative_sampling import corrected


def logit(p):
    return np.log(p) - np.log1p(-p)


@pytest.mark.parametrize("rate", [1.0, 0.5, 0.1, 1e-3])
def test_of_a_single_label(rate):
    truth = np.random.default_rng(0).random(500) * 0.98 + 0.01
    # Among the rows that are kept.
    kept = truth / (truth + rate * (1 - truth))
    found = corrected(torch.tensor(logit(kept)), rate).sigmoid().numpy()
    np.testing.assert_allclose(found, truth, rtol=1e-12)
    np.testing.assert_allclose(found, kept / (kept + (1 - kept) / rate), rtol=1e-12)


@pytest.mark.parametrize("rate", [1.0, 0.2, 1e-3])
@pytest.mark.parametrize("dtype, most", [(torch.float64, 1e-11), (torch.float32, 2e-5)])
def test_of_goals_that_follow_the_first(rate, dtype, most):
    draw = np.random.default_rng(1)
    click = draw.random(500) * 0.98 + 0.01
    truth = np.stack([click, click * draw.random(500) * 0.98 + 1e-3, click * 0.5], 1)
    # Rows without a click are kept with a share of `rate`, all others are kept.
    kept = truth / (click + rate * (1 - click))[:, None]
    found = corrected(torch.tensor(logit(kept), dtype=dtype), rate).sigmoid().double().numpy()
    np.testing.assert_allclose(found, truth, rtol=most)


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[200.0, 190.0], [-200.0, -150.0], [0.0, 120.0], [150.0, 200.0]])
    found = corrected(logits, 0.1)
    assert found.isfinite().all()
    assert torch.equal(found[:, 0], corrected(logits[:, 0], 0.1))
