"""Synthetic histories: what decides clicks is what the documentation says."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from stampede.data.synthetic_histories import ITEMS, MOST, SyntheticHistories, _Truth


@pytest.fixture(scope="module")
def drawn():
    clicks = SyntheticHistories(seed=3)
    dataset = clicks.dataset(5000, 20_000, 1000)
    return clicks, dataset, dataset.test.read(torch.arange(20_000))


def cells(samples):
    return [ids.tolist() for ids in samples.bags[0].values.split(samples.bags[0].lengths.tolist())]


def test_the_probability_is_that_of_the_formula(drawn):
    clicks, _, samples = drawn
    truth = _Truth(clicks)
    for row, cell in enumerate(cells(samples)[:500]):
        item = int(samples.ids[row, 1])
        matches = sum(
            np.exp(-back / clicks.memory)
            for back, one in enumerate(reversed(cell))
            if truth.genres[one] == truth.genres[item]
        )
        logit = clicks.bias + truth.weights[item] + clicks.strength * (1 - np.exp(-matches))
        assert float(samples.true_probability[row]) == pytest.approx(1 / (1 + np.exp(-logit)))


def test_labels_are_drawn_from_the_probability(drawn):
    _, _, samples = drawn
    expected = samples.true_probability.double()
    deviation = (expected * (1 - expected)).sum().sqrt()
    assert abs(samples.label.sum() - expected.sum()) < 4 * deviation


def test_histories(drawn):
    _, dataset, samples = drawn
    lengths = samples.bags[0].lengths
    assert 0 < (lengths == 0).float().mean() < 0.2 and lengths.max() <= MOST
    assert 11 < lengths.float().mean() < 13
    values = samples.bags[0].values
    assert values.min() >= 0 and values.max() < ITEMS == dataset.vocabulary_sizes["history"]
    # A row does not depend on which others are read.
    rows = torch.tensor([19_999, 7, 2500, 7])
    again, whole = dataset.test.read(rows), cells(samples)
    assert cells(again) == [whole[row] for row in rows]
    assert torch.equal(again.ids, samples.ids[rows])
    assert dataset.validation.rows == 1000 and dataset.train.rows == 4000


def test_tastes_drift(drawn):
    """Recent ids tell more about the item shown than those of long ago do."""
    clicks, _, samples = drawn
    genres, shares = _Truth(clicks).genres, {}
    for back in (1, 40):
        pairs = [
            (genres[cell[-back]], genres[int(samples.ids[row, 1])])
            for row, cell in enumerate(cells(samples))
            if len(cell) >= back
        ]
        shares[back] = np.mean([one == other for one, other in pairs])
    assert shares[1] > 1.3 * shares[40]


def test_the_attainable_auc(drawn):
    _, _, samples = drawn
    found = roc_auc_score(samples.label.numpy(), samples.true_probability.numpy())
    assert 0.87 < found < 0.91
