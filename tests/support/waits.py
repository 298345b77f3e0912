"""What would wait for a GPU, seen on a CPU."""

from contextlib import contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_SIZES_FROM_VALUES = ("nonzero", "unique", "masked_select", "equal.")


class _Waits(TorchDispatchMode):
    def __init__(self, on_cpu):
        super().__init__()
        self.on_cpu = {tensor.data_ptr() for tensor in on_cpu}
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        reads = "_local_scalar_dense" in name and args[0].data_ptr() not in self.on_cpu
        # torch's manual: given the size of its output, repeat_interleave does not wait.
        sizes = "repeat_interleave.Tensor" in name and (kwargs or {}).get("output_size") is None
        if reads or sizes or any(word in name for word in _SIZES_FROM_VALUES):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def noted_waits(on_cpu=()):
    """Gives a list, to which the names of operators are added that would wait for the device.

    Args:
        on_cpu: tensors that lie on the CPU anyway.
    """
    waits, tolist = _Waits(on_cpu), torch.Tensor.tolist

    def noted(tensor):
        waits.found.append("tolist")
        return tolist(tensor)

    with mock.patch.object(torch.Tensor, "tolist", noted), waits:
        yield waits.found
