"""The scaling rules' table, and warm-up."""

import pytest

from stampede.optim import Hyperparameters, linear_warmup, scale

BASE = Hyperparameters(embedding_lr=1e-4, embedding_l2=1e-5, dense_lr=8e-4)


@pytest.mark.parametrize(
    "rule, lr, l2, dense",
    [
        ("none", 1, 1, 1),
        ("linear", 4, 1, 4),
        ("sqrt", 2, 2, 2),
        ("sqrt_star", 2, 1, 2),
        ("n2_lambda", 1, 16, 2),
        ("cowclip", 1, 4, 2),
    ],
)
def test_factors_of_a_batch_four_times_the_base(rule, lr, l2, dense):
    scaled = scale(BASE, rule, 4096, 1024)
    assert scaled.embedding_lr == pytest.approx(1e-4 * lr)
    assert scaled.embedding_l2 == pytest.approx(1e-5 * l2)
    assert scaled.dense_lr == pytest.approx(8e-4 * dense)


def test_unknown_rule():
    with pytest.raises(ValueError, match="cowclip"):
        scale(BASE, "cubic", 4096, 1024)


def test_warmup_is_a_line_from_1e_8():
    rates = [linear_warmup(step, 4, 1.0) for step in range(6)]
    assert rates[0] == 1e-8
    assert rates[1:] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert linear_warmup(0, 0, 0.3) == 0.3
