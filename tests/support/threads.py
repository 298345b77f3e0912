"""How many threads torch uses."""

from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(threads):
    """Lets torch, and the reader, use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
