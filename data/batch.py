"""What a model is fed: one rank's part of a global batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


@dataclass
class Batch(Pipelineable):
    """One rank's part of a global batch.

    Attributes:
        sparse: ids of every field; a padding sample has none.
        dense: `[n, numbers]` float32.
        label: `[n]` float32, 0 or 1.
        weight: `[n]` float32, 1 for a sample and 0 for padding.
        global_samples: samples of the whole global batch, padding not counted.
        true_probability: `[n]` float32, the probability that the label was drawn with, where the
            data know it.
    """

    sparse: KeyedJaggedTensor
    dense: Tensor
    label: Tensor
    weight: Tensor
    global_samples: int
    true_probability: Tensor | None = None

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """A copy on `device`."""
        probability = self.true_probability
        return Batch(
            self.sparse.to(device, non_blocking=non_blocking),
            self.dense.to(device, non_blocking=non_blocking),
            self.label.to(device, non_blocking=non_blocking),
            self.weight.to(device, non_blocking=non_blocking),
            self.global_samples,
            None if probability is None else probability.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that `stream` uses this batch."""
        self.sparse.record_stream(stream)
        for tensor in (self.dense, self.label, self.weight, self.true_probability):
            if tensor is not None:
                tensor.record_stream(stream)
