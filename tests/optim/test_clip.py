"""Thresholds by hand, and the edges of the rule."""

import math

import pytest
import torch

from stampede.optim import CowClip
from stampede.optim.clip import clip_rows_, row_threshold


@pytest.mark.parametrize(
    "norm, count, expected",
    [
        (2.0, 1, 0.5 * 2.0),
        (2.0, 7, 0.5 * 2.0 * 7),
        (2.0, 0, 0.5 * 2.0),
        (0.0, 3, 0.5 * 0.5 * math.sqrt(10) * 0.1 * 3),
    ],
)
def test_reference_threshold(norm, count, expected):
    clip = CowClip(ratio=0.5, bound=0.1)
    found = row_threshold(torch.tensor([norm]), torch.tensor([count]), 10, clip)
    assert found.item() == pytest.approx(expected)


@pytest.mark.parametrize(
    "norm, count, expected", [(2.0, 7, 0.5 * 2.0 * 7), (0.0, 3, 0.1 * 3), (0.19, 1, 0.1)]
)
def test_paper_threshold(norm, count, expected):
    clip = CowClip(ratio=0.5, bound=0.1, variant="paper")
    found = row_threshold(torch.tensor([norm]), torch.tensor([count]), 10, clip)
    assert found.item() == pytest.approx(expected)


def test_only_rows_over_their_threshold_are_scaled():
    weights = torch.tensor([[3.0, 4.0], [3.0, 4.0]])
    grads = torch.tensor([[30.0, 40.0], [0.3, 0.4]])
    over = clip_rows_(grads, weights, torch.tensor([2, 1]), CowClip())
    assert over.tolist() == [True, False]
    torch.testing.assert_close(grads, torch.tensor([[6.0, 8.0], [0.3, 0.4]]))


def test_columns_beyond_the_clipped_ones_are_left_alone():
    weights = torch.tensor([[3.0, 4.0, 100.0]])
    grads = torch.tensor([[30.0, 40.0, 7.0]])
    clip_rows_(grads, weights, torch.tensor([1]), CowClip(columns=2))
    torch.testing.assert_close(grads, torch.tensor([[3.0, 4.0, 7.0]]))


def test_sqrt_of_the_clipped_columns_not_of_the_stored_ones():
    grads = torch.full((1, 12), 1.0)
    clip_rows_(grads, torch.zeros(1, 12), torch.tensor([1]), CowClip(bound=0.01, columns=10))
    assert grads[0, :10].norm().item() == pytest.approx(math.sqrt(10) * 0.01)


@pytest.mark.parametrize("gradient", [0.0, 1.0])
def test_a_zero_row_without_bound_gets_no_gradient_and_no_nan(gradient):
    grads = torch.full((1, 4), gradient)
    clip_rows_(grads, torch.zeros(1, 4), torch.tensor([1]), CowClip(bound=0.0))
    assert grads.abs().max() == 0


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"ratio": 0}, "ratio is 0"),
        ({"ratio": float("nan")}, "ratio is nan"),
        ({"bound": -1}, "bound is -1"),
        ({"variant": "tf"}, "'reference' or 'paper'"),
        ({"columns": 0}, "columns is 0"),
    ],
)
def test_settings_out_of_range_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        CowClip(**arguments)
