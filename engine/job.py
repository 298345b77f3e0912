"""The model of a configuration, and the job that trains it with both optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from stampede.engine.config import Config
from stampede.engine.precision import DensePrecision
from stampede.models import CTRModel, EmbeddingFront
from stampede.optim import BackwardUpdate, DenseAdam, Scaled


@dataclass
class Job:
    """A sharded model with its optimizers.

    Attributes:
        model: the sharded model; its tables are updated in backward.
        dense_parameters: parameters of the dense layers, by name.
        dense_optimizer: their optimizer.
        scaling: settings at the base batch size and at the configured one.
        precision: of the dense layers.
        passes: the forward and backward passes of a step.
        table_update: updates tables with CowClip in backward.
        seed: of random numbers in the dense layers, such as dropout.
        skips_nonfinite: whether to skip a batch whose loss is not finite.
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
        """The model without its wrappers."""
        return self.model.module

    @property
    def dense_buffers(self) -> dict[str, Tensor]:
        """Buffers of the network, such as BatchNorm's running mean, by name."""
        return dict(self.ctr_model.network.named_buffers(prefix="network"))

    @property
    def front(self) -> EmbeddingFront:
        """The module with the tables."""
        return self.ctr_model.front

    def set_learning_rates(self, embedding: float, dense: float) -> None:
        """Set the rates of the tables and of the dense layers for the next step."""
        for group in self.dense_optimizer.param_groups:
            group["lr"] = dense
        for group in self.model.fused_optimizer.param_groups:
            group["lr"] = embedding
        # Fused tables are updated in backward; step() only passes on the rate.
        self.model.fused_optimizer.step()

    def state(self, rank: int) -> dict[str, Any]:
        """All trained tensors, to be read and written in place, and the random state.

        Brings all rows of the tables up to date. All ranks must call it at the same point.

        Args:
            rank: of this process; its random state is copied.
        """
        return {
            "model": self.model.state_dict(),
            "fused": self.model.fused_optimizer.state_dict()["state"],
            "dense": {
                name: self.dense_optimizer.state[parameter]
                for name, parameter in self.dense_parameters.items()
            },
            "random": {f"rank_{rank}": torch.get_rng_state()},
        }


def build_model(config: Config, vocabulary_sizes: Mapping[str, int], numbers: int) -> CTRModel:
    """The model before sharding: its tables, with the rows of `vocabulary_sizes`, are on `meta`."""
    return CTRModel(
        config.model.name,
        vocabulary_sizes,
        numbers,
        config.model.dim,
        config.model.hidden,
        config.run.seed,
        config.model.options,
        first_order_scale=config.model.first_order_scale,
        dropout=config.model.dropout,
        normalization=config.model.normalization,
    )


def move_dense(model: CTRModel, device: torch.device) -> None:
    """Move all but the tables, which get their memory in sharding."""
    for child in model.children():
        if child is not model.front:
            child.to(device)
    model.bias.data = model.bias.data.to(device)
