"""Settings of all tests."""

import gc

import torch

# The tensors are small: threads would cost more than they bring, many times more on a busy machine.
torch.set_num_threads(1)


def pytest_collection_finish():
    """Guards of the optimizers look at every object of the process; those from here on suffice."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    # Libraries complain at exit of objects that are still there.
    gc.unfreeze()
