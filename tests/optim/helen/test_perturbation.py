"""How far rows are moved."""

import pytest
import torch

from stampede.optim.helen import perturbation


def test_perturbation_by_hand():
    grads = torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]])
    counts = torch.tensor([8, 4, 1])
    moved = perturbation(grads, counts, torch.tensor(5.0), torch.tensor(8), rho=0.5, bound=0.6)
    torch.testing.assert_close(moved, torch.tensor([[0.3, 0.0], [0.0, 0.24], [0.0, 0.0]]))


def test_perturbation_of_a_part_of_the_rows_is_that_part():
    draw = torch.Generator().manual_seed(0)
    grads, counts = torch.randn(9, 4, generator=draw), torch.arange(1, 10)
    whole = (grads.norm(), counts.max(), 0.05, 0.3)
    parts = [perturbation(grads[i], counts[i], *whole) for i in (slice(0, 4), slice(4, 9))]
    assert torch.equal(torch.cat(parts), perturbation(grads, counts, *whole))
    assert perturbation(grads[:0], counts[:0], *whole).shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_zero_gradient_moves_nothing(dtype):
    zero, counts = torch.zeros(2, 3, dtype=dtype), torch.tensor([1, 2])
    moved = perturbation(zero, counts, zero.norm(), counts.max(), 0.05, 0.3)
    assert moved.dtype == dtype and torch.equal(moved, zero)
