"""What the dense layers of a model keep in memory during a step, measured."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from stampede.models import CTRModel

# Samples of the two passes whose difference is measured.
_SAMPLES = (16, 32)


def activation_bytes_per_sample(model: CTRModel) -> int:
    """Most bytes that are alive at a time in forward and backward, for each sample.

    Forward and backward run for a few samples on the CPU in float32. The looked-up rows are not
    counted, their gradient is; weights and their gradients are not.

    Args:
        model: its dense layers on the CPU, its tables on `meta`; it is left as it is.
    """
    front, fields = model.front, len(model.front.fields)
    dense = copy.copy(model)
    # All but the tables; a module's own state, as running means, is not to change.
    dense._modules = {
        name: copy.deepcopy(module) if module is not front else front
        for name, module in model._modules.items()
    }
    peaks = []
    with torch.random.fork_rng(devices=[]):
        for samples in _SAMPLES:
            rows = torch.randn(samples, fields * front.columns.stored, requires_grad=True)
            inputs = torch.randn(samples, model.numbers)
            known = [rows, inputs, *dense.parameters(), *dense.buffers()]
            with _LiveBytes(known) as live:
                logits = dense.logits(rows, inputs)
                # A network need not use its embeddings.
                torch.autograd.grad(logits.sum(), rows, allow_unused=True)
            peaks.append(live.peak)
    return -(-(peaks[1] - peaks[0]) // (_SAMPLES[1] - _SAMPLES[0]))


class _LiveBytes(TorchDispatchMode):
    """Adds up the bytes of all tensors that operations make, as long as these are alive.

    Args:
        known: tensors that are not counted.

    Attributes:
        peak: most bytes alive at a time.
    """

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._live = 0
        self._storages = {_key(tensor) for tensor in known}

    def __torch_dispatch__(
        self,
        operation: Any,
        kinds: Sequence[type],
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        made = operation(*arguments, **(named or {}))
        tree_map_only(Tensor, self._count, made)
        return made

    def _count(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if key in self._storages:
            return
        storage = tensor.untyped_storage()
        self._storages.add(key)
        self._live += storage.nbytes()
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._free, key, storage.nbytes())

    def _free(self, key: int, size: int) -> None:
        self._storages.discard(key)
        self._live -= size


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
