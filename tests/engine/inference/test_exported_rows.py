"""Rows of an exported package that are narrower than the trained ones."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from stampede.engine.errors import RunFolderError
from stampede.engine.inference.packaging import stored_rows
from stampede.engine.inference.trained import open_trained
from stampede.engine.tables import FieldWeights, read_field
from support.packages import loaded


# Largest difference of a logit from fp32 on the test part, where their standard deviation is 1.7;
# 1.6e-4 and 2.8e-3 were found.
@pytest.mark.slow
@pytest.mark.parametrize("kind, least, most", [("fp16", 1e-7, 2e-4), ("int8", 1e-5, 5e-3)])
def test_the_error_of_narrow_rows(packages, trainers, kind, least, most):
    columns, logits = trainers
    error = np.abs(loaded(packages / kind).logits(columns) - logits).max()
    assert least < error < most, error


def test_no_element_is_off_by_more_than_its_type_says(packages, trained_run):
    checkpoint = open_trained(trained_run).checkpoint
    for field in ("user", "genres"):
        weights = read_field(checkpoint, field)
        exact, half, int8 = (
            load_file(packages / kind / f"tables/{field}.safetensors")
            for kind in ("fp32", "fp16", "int8")
        )
        assert torch.equal(exact["embedding"], weights.embedding)
        assert torch.equal(exact["first_order"], weights.first_order[:, 0])
        # 11 bits: half of the last one is 2^-11 of the value; below 2^-14 steps are of 2^-24.
        for name, true in exact.items():
            error = (half[name].float() - true).abs()
            assert bool((error <= (true.abs() * 2**-11).clamp_min(2**-25)).all())
        error = int8["embedding"].float() * int8["scale"][:, None] - weights.embedding
        assert bool((error.abs() <= int8["scale"][:, None] * 0.5001).all())
        assert int8["embedding"].abs().amax(1).eq(127).all()


def test_rows_of_zeros_and_weights_too_large(tmp_path):
    weights = FieldWeights(torch.tensor([[0.0, 0.0], [1.0, -2.0]]), torch.tensor([[0.0], [3.0]]))
    found = stored_rows(weights, "int8", "user")
    assert found["embedding"].tolist() == [[0, 0], [64, -127]]
    assert found["scale"].tolist() == pytest.approx([0.0, 2 / 127])
    large = FieldWeights(torch.tensor([[1e5]]), torch.tensor([[0.0]]))
    with pytest.raises(RunFolderError, match=r"user: a weight of 100000 .*--rows fp32"):
        stored_rows(large, "fp16", "user")
