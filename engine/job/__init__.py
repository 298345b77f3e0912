"""The model of a configuration, and the job that trains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from stampede.engine.config import Config
from stampede.engine.job.precision import DensePrecision
from stampede.models import CTRModel, EmbeddingFront
from stampede.optim import BackwardUpdate, DenseAdam, Scaled
from stampede.settings import SettingsError


@dataclass
class Job:
    """A sharded model with its optimizers; `table_update` updates the tables in backward.

    Attributes:
        scaling: settings at the base batch size and at the configured one.
        seed: of random numbers in the dense layers, such as dropout.
        skips_nonfinite: whether to skip a batch whose loss is not finite.
        threads: of a training step on a CPU; None for torch's.
        mean: of the weights at some steps of the current epoch, on the CPU, like the model's
            `state_dict`; None before the first one, see `stampede.engine.training.averaging`.
    """

    model: DistributedModelParallel
    dense_parameters: dict[str, Tensor]
    dense_optimizer: DenseAdam
    scaling: Scaled
    precision: DensePrecision
    table_update: BackwardUpdate | None = None
    seed: int = 0
    skips_nonfinite: bool = False
    threads: int | None = None
    mean: dict[str, Any] | None = None

    @property
    def ctr_model(self) -> CTRModel:
        """The model without its wrappers."""
        return self.model.module

    @property
    def dense_buffers(self) -> dict[str, Tensor]:
        """Buffers of the dense layers, such as BatchNorm's running mean, by name."""
        model = self.ctr_model
        parts = {"network": model.network, "attention": model.attention}
        return {n: b for part in parts for n, b in parts[part].named_buffers(prefix=part)}

    @property
    def front(self) -> EmbeddingFront:
        """The module with the tables."""
        return self.ctr_model.front

    def set_learning_rates(self, embedding: float, dense: float) -> None:
        """Set the rates of the tables and of the dense layers for the next step."""
        for group in self.dense_optimizer.param_groups:
            group["lr"] = dense
        for group in self.model.fused_optimizer.param_groups:
            # The tables' update in backward reads it here.
            group["lr"] = embedding

    def state(self, rank: int) -> dict[str, Any]:
        """All trained tensors, to be read and written in place, and this rank's random state.

        Brings all rows of the tables up to date. All ranks must call it at the same point.
        """
        state = {
            "model": self.model.state_dict(),
            "fused": self.model.fused_optimizer.state_dict()["state"],
            "dense": {
                name: self.dense_optimizer.state[parameter]
                for name, parameter in self.dense_parameters.items()
            },
            "random": {f"rank_{rank}": torch.get_rng_state()},
        }
        return state if self.mean is None else {**state, "mean": self.mean}


class ModelInputs(Protocol):
    """What a model is built for; see `stampede.data.Dataset`."""

    vocabulary_sizes: Mapping[str, int]
    numbers: int
    shared: Mapping[str, str]
    mean: Sequence[str]
    goals: Sequence[str]
    attention: Mapping[str, str]
    sequences: Mapping[str, str]
    weighted: Sequence[str]


def build_model(config: Config, data: ModelInputs) -> CTRModel:
    """The model before sharding: its tables are on `meta`.

    Raises:
        SettingsError: the configuration does not fit the data.
    """
    for key in ("dims", "pretrained"):
        for field in getattr(config.model, key):
            _check_has_table(key, field, data)
    return CTRModel(
        config.model.name,
        data.vocabulary_sizes,
        data.numbers,
        config.model.dim,
        config.model.hidden,
        config.run.seed,
        config.model.options,
        shared=data.shared,
        mean=data.mean,
        attention=data.attention,
        sequences=data.sequences,
        dims=config.model.dims,
        weighted=data.weighted,
        unit=config.model.attention,
        first_order_scale=config.model.first_order_scale,
        dropout=config.model.dropout,
        normalization=config.model.normalization,
        goals=data.goals,
        goal_weights=config.train.goals,
        goal_weighting=config.train.goal_weighting,
    )


def _check_has_table(key: str, field: str, data: ModelInputs) -> None:
    owners = [name for name in data.vocabulary_sizes if name not in data.shared]
    if field not in owners:
        table = data.shared.get(field)
        what = f"uses the table of {table}" if table else "is no id field"
        raise SettingsError(f"model.{key}: {field!r} {what}; write one of {', '.join(owners)}")


def move_dense(model: CTRModel, device: torch.device) -> None:
    """Move all but the tables, which get their memory in sharding."""
    for child in model.children():
        if child is not model.front:
            child.to(device)
    model.bias.data = model.bias.data.to(device)
