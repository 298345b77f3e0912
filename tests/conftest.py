"""Settings of all tests."""

import torch

# The tensors are small: threads would cost more than they bring, many times more on a busy machine.
torch.set_num_threads(1)
