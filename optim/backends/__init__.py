"""The choice of kernels for an array of tables: PyTorch, C++ or Triton."""

from __future__ import annotations

import logging

from stampede.optim import native
from stampede.optim.backends.cpu import CpuBackend
from stampede.optim.backends.torch import TorchBackend
from stampede.optim.nonfinite import NonFiniteFlag
from stampede.optim.table_array import TableArray

_LOG = logging.getLogger("stampede.optim")


def choose_backend(
    array: TableArray,
    *,
    defers: bool = False,
    flag: NonFiniteFlag | None = None,
) -> TorchBackend:
    """Choose the kernels of an array, once, when it is sharded or first updated.

    Args:
        defers: whether such rows may wait until they are looked up; readers of the table must then
            call `catch_up` or `flush` first.
        flag: stops updates that are queued on a GPU.
    """
    if flag is not None:
        from stampede.optim.backends.triton import TritonBackend

        backend = TritonBackend(array, flag)
    elif native.handles(array.weights):
        backend = CpuBackend(array, defers=defers)
    else:
        backend = TorchBackend(array)
    waits = backend.waiting is not None and backend.waiting.defers
    _LOG.debug(
        "%s: updated by %s%s",
        ", ".join(shard.table for shard in array.shards),
        backend.name,
        "; rows that no batch holds take their steps later" if waits else "",
    )
    return backend
