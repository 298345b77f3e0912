"""What a model is fed: one rank's part of a global batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


@dataclass
class Batch(Pipelineable):
    """One rank's part of a global batch: samples, then padding.

    Attributes:
        sparse: ids of every field, single-valued ones first; a padding sample has none. Batches
            may share the lengths: do not write to them.
        dense: `[n, numbers]` float32.
        label: `[n]` float32, 0 or 1.
        weight: `[n]` float32, what a sample counts for in the loss: 1 where the data have no
            weights, 0 for padding.
        global_samples: samples of the whole global batch, padding not counted.
        global_weight: sum of the weights of the whole global batch, a float64 scalar where the
            weights lie on a GPU; default: `global_samples`.
        samples: how many of this rank's are no padding; default: all.
        true_probability: `[n]` float32, the probability that the label was drawn with, where the
            data know it.
    """

    sparse: KeyedJaggedTensor
    dense: Tensor
    label: Tensor
    weight: Tensor
    global_samples: int
    global_weight: float | Tensor | None = None
    samples: int | None = None
    true_probability: Tensor | None = None

    def __post_init__(self) -> None:
        if self.global_weight is None:
            self.global_weight = float(self.global_samples)
        if self.samples is None:
            self.samples = len(self.label)

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """A copy on `device`."""
        return self._each(lambda held: held.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory, from which a GPU copies while others go on."""
        return self._each(lambda held: held.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that `stream` uses this batch."""
        for held in self._held().values():
            held.record_stream(stream)

    def _held(self) -> dict[str, Any]:
        """The tensors."""
        everything = {field.name: getattr(self, field.name) for field in fields(self)}
        kinds = (Tensor, KeyedJaggedTensor)
        return {name: held for name, held in everything.items() if isinstance(held, kinds)}

    def _each(self, copy: Callable[[Any], Any]) -> Batch:
        return replace(self, **{name: copy(held) for name, held in self._held().items()})
