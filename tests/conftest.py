"""Settings of all tests."""

import gc
import os

import torch

# The tensors are small: threads would cost more than they bring, many times more on a busy machine.
torch.set_num_threads(1)

# Where there is no GPU, Triton's kernels run in its interpreter; that must be said before anything
# imports Triton, as TorchRec does.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish():
    """Guards of the optimizers look at every object of the process; those from here on suffice."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    # Libraries complain at exit of objects that are still there.
    gc.unfreeze()
