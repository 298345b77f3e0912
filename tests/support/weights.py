"""Weights that runs have come to."""

import torch

from stampede.engine.inference.trained import open_trained, whole_model


def check_weights(one, other, tolerance=0.0):
    """Check that all tables and layers of the newest checkpoints are the same.

    Args:
        tolerance: of the largest weight of a tensor.
    """
    one, other = (
        whole_model(open_trained(run, "newest"), torch.device("cpu")).state_dict()
        for run in (one, other)
    )
    assert one.keys() == other.keys()
    for name, value in one.items():
        bound = tolerance * float(other[name].abs().max())
        assert torch.allclose(value, other[name], rtol=0, atol=bound), name
