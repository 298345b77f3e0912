"""Factors and thresholds of the clipping family by hand, and the edges of the rules."""

import pytest
import torch

from stampede.optim import CowClip


@pytest.mark.parametrize(
    "arguments, expected",
    [
        # Gradient norms 50, 0.5, 50; weight norms 5, 5, 0; counts 2, 1, 0.
        ({}, [10 / 50, 1.0, 0.2 / 50]),
        ({"ratio": 0.5}, [5 / 50, 1.0, 0.05 / 50]),
        ({"variant": "paper"}, [10 / 50, 1.0, 0.1 / 50]),
        ({"granularity": "row", "threshold": 4.0}, [8 / 50, 1.0, 4 / 50]),
        ({"granularity": "row", "threshold": 0.25}, [0.5 / 50, 0.25 / 0.5, 0.25 / 50]),
    ],
)
def test_row_factors(arguments, expected):
    grads = torch.tensor([50.0, 0.5, 50.0]).square()
    weights = torch.tensor([5.0, 5.0, 0.0]).square()
    # Four columns, so that sqrt(4) * bound = 0.2 is the reference's floor.
    clip = CowClip(bound=0.1, **arguments)
    found = clip.factor(grads, weights, torch.tensor([2, 1, 0]), 4)
    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize("grad", [0.0, 1e-30, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_weights_without_bound_let_no_gradient_through_and_give_no_nan(grad, dtype):
    grads, zero = torch.tensor([grad], dtype=dtype), torch.zeros(1, dtype=dtype)
    rows = CowClip(bound=0.0).factor(grads, zero, torch.tensor([3]), 4)
    assert rows.item() * grad == 0.0
    assert rows.dtype == dtype


def test_a_gradient_of_zero_or_at_its_threshold_is_not_clipped():
    one, zero, five = torch.ones(1), torch.zeros(1), torch.tensor([25.0])
    for grad, weight in ((zero, zero), (zero, one), (five, five)):
        assert CowClip(bound=0.0).factor(grad, weight, one, 4).item() == 1.0
        assert CowClip("row", threshold=5.0).factor(grad, weight, one, 4).item() == 1.0


@pytest.mark.parametrize(
    "clip, l2, expected",
    [
        (CowClip("none"), 100.0, False),
        (CowClip("row", threshold=100.0), 1e-9, True),
        (CowClip("row", threshold=100.0), 0.0, False),
        # ||2*l2*w|| <= r*||w|| up to 2*l2 = r.
        (CowClip(ratio=0.5), 0.25, False),
        (CowClip(ratio=0.5), 0.26, True),
    ],
)
def test_whether_the_decay_alone_can_be_clipped(clip, l2, expected):
    assert clip.may_clip_decay(l2) is expected


@pytest.mark.parametrize(
    "arguments, words",
    [
        *(({"granularity": "row", "threshold": x}, f"threshold is {x}")
          for x in (0.0, -1.0, float("nan"), float("inf"))),
        ({"granularity": "row"}, "'row' needs a threshold"),
        *(({"granularity": name, "threshold": 1.0}, f"'{name}' has no threshold")
          for name in ("none", "cowclip")),
        ({"ratio": 0}, "ratio is 0"),
        ({"ratio": float("nan")}, "ratio is nan"),
        ({"bound": -1}, "bound is -1"),
        ({"bound": float("inf")}, "bound is inf"),
        ({"bound": "1e-5"}, "bound is '1e-5'; write a number"),
        ({"variant": "tf"}, "'reference' or 'paper'"),
        ({"columns": 0}, "columns is 0"),
        ({"granularity": "column"}, "granularity is 'column'; write one of none, row, cowclip"),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        CowClip(**arguments)
