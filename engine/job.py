"""What is trained: a sharded model with its optimizers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from stampede.engine.precision import DensePrecision
from stampede.models import CTRModel, EmbeddingFront
from stampede.optim import BackwardUpdate, DenseAdam, Scaled


@dataclass
class Job:
    """What is trained.

    Attributes:
        model: the sharded model; its tables are updated in backward.
        dense_parameters: parameters of the dense layers, by name.
        dense_optimizer: their optimizer.
        scaling: settings at the base batch size, and at the configured one.
        precision: of the dense layers.
        passes: forward and backward passes of a step.
        table_update: what updates tables with CowClip in backward.
        seed: of what the dense layers draw in a step, as dropout does.
        skips_nonfinite: whether a batch whose loss is not finite is left out.
    """

    model: DistributedModelParallel
    dense_parameters: dict[str, Tensor]
    dense_optimizer: DenseAdam
    scaling: Scaled
    precision: DensePrecision
    passes: int = 1
    table_update: BackwardUpdate | None = None
    seed: int = 0
    skips_nonfinite: bool = False

    @property
    def ctr_model(self) -> CTRModel:
        """The model within."""
        return self.model.module

    @property
    def dense_buffers(self) -> dict[str, Tensor]:
        """What the network keeps besides parameters, as BatchNorm its running mean, by name."""
        return dict(self.ctr_model.network.named_buffers(prefix="network"))

    @property
    def front(self) -> EmbeddingFront:
        """The model's tables."""
        return self.ctr_model.front
