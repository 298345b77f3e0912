"""The update of embedding rows on a GPU, in Triton kernels.

Nothing here is imported unless it is used: `stampede.optim` works without Triton. No function waits
for the device; the number of distinct rows stays there, and buffers have room for as many as there
can be.
"""

from importlib.util import find_spec

from torch import Tensor


def is_available() -> bool:
    """Whether the kernels can run: Triton is installed, and a GPU or its interpreter is there."""
    if find_spec("triton") is None:
        return False
    import torch
    from triton import knobs

    return torch.cuda.is_available() or bool(knobs.runtime.interpret)


def handles(weights: Tensor) -> bool:
    """Whether the kernels are to update a table with these weights."""
    return weights.is_cuda and is_available()
