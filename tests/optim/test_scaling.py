"""The scaling rules and the table of what they changed."""

import pytest

from stampede.optim import Hyperparameters, Scaled, scale

BASE = Hyperparameters(embedding_lr=1e-4, embedding_l2=1e-5, dense_lr=8e-4)

# The rule, and its factors for a batch four times the base.
FACTORS = [
    ("none", 1, 1, 1),
    ("linear", 4, 1, 4),
    ("sqrt", 2, 2, 2),
    ("sqrt_star", 2, 1, 2),
    ("n2_lambda", 1, 16, 2),
    ("cowclip", 1, 4, 2),
]


@pytest.mark.parametrize("rule, lr, l2, dense", FACTORS)
def test_a_batch_four_times_the_base(rule, lr, l2, dense):
    change = scale(BASE, rule, 4096, 1024)
    assert change == Scaled(rule, 4096, 1024, BASE, change.scaled)
    found = change.scaled.embedding_lr, change.scaled.embedding_l2, change.scaled.dense_lr
    assert found == pytest.approx((1e-4 * lr, 1e-5 * l2, 8e-4 * dense))
    first, *lines = [line.split() for line in change.table().splitlines()]
    if rule == "none":
        assert first == ["scaling", "rule", "none", "batch", "4096"]
        assert lines[0] == ["embedding_lr", "0.0001"]
    else:
        assert first == f"scaling rule {rule} batch 1024 factor batch 4096".split()
        assert lines[0] == ["embedding_lr", "0.0001", "x", f"{lr}", f"{1e-4 * lr:.3g}"]


@pytest.mark.parametrize(
    "rule, batch, base, words",
    [
        ("cubic", 4096, 1024, "'cubic'; write one of none, linear.*cowclip"),
        ("cowclip", 0, 1024, "at least 1"),
        ("cowclip", 4096, 0, "at least 1"),
        ("cowclip", -1, -1, "at least 1"),
    ],
)
def test_unknown_rules_and_batches_below_one_are_refused(rule, batch, base, words):
    with pytest.raises(ValueError, match=words):
        scale(BASE, rule, batch, base)
