"""Builds both optimizers and their learning rates from the configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stampede.engine.config import Config
from stampede.optim import (
    CowClip,
    CowClipAdagrad,
    CowClipAdam,
    CowClipRowWiseAdagrad,
    CowClipRowWiseAdam,
    CowClipSGD,
    DenseAdam,
    Hyperparameters,
    Scaled,
    learning_rate,
    scale,
)
from stampede.optim.baselines import BASELINES, baseline_optimizer
from stampede.settings import SettingsError

_WITH_CLIP: dict[str, type[torch.optim.Optimizer]] = {
    "adam": CowClipAdam,
    "rowwise_adam": CowClipRowWiseAdam,
    "adagrad": CowClipAdagrad,
    "rowwise_adagrad": CowClipRowWiseAdagrad,
    "sgd": CowClipSGD,
}


def scaled_hyperparameters(config: Config) -> Scaled:
    """Settings for the base batch size, as configured, and for the actual one."""
    base = Hyperparameters(
        embedding_lr=config.optim.embedding.lr,
        # FBGEMM's Adam has no l2.
        embedding_l2=getattr(config.optim.embedding, "l2", 0.0),
        dense_lr=config.optim.dense.lr,
    )
    scaling = config.optim.scaling
    return scale(base, scaling.rule, config.train.batch_size, scaling.base_batch_size)


def table_optimizer(
    config: Config, scaled: Hyperparameters, columns: int, device: torch.device
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Class and arguments for `apply_optimizer_in_backward`, at the actual batch size.

    `columns` of a stored row are the embedding; these are clipped.
    """
    section = config.optim.embedding
    arguments = section.model_dump(exclude={"optimizer", "schedule", "plateau", "clip"})
    arguments["lr"] = scaled.embedding_lr
    if "l2" in arguments:
        arguments["l2"] = scaled.embedding_l2
    if section.optimizer in BASELINES:
        try:
            return baseline_optimizer(section.optimizer, device_type=device.type, **arguments)
        except ValueError as failure:
            raise SettingsError(f"optim.embedding: {failure}") from None
    none = CowClip(granularity="none", columns=columns)
    arguments["clip"] = none if section.clip is None else section.clip.as_clip(columns)
    return _WITH_CLIP[section.optimizer], arguments


def dense_optimizer(
    config: Config,
    scaled: Hyperparameters,
    parameters: Mapping[str, Tensor],
    l2: Mapping[int, float],
) -> DenseAdam:
    """Adam for the dense layers; `l2` has the coefficients of parameters, by `id`."""
    dense = config.optim.dense
    # Weight decay is for the network's matrices. Biases and norms that are matrices are recognised
    # by name; first-order weights of numbers decay like the ids'.
    spared = re.compile(r"(^number_weights\.)|(^|[._])(bias|norm)([._]|$)")
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, parameter in parameters.items():
        decays = parameter.ndim > 1 and not spared.search(name)
        settings = l2.get(id(parameter), 0.0), dense.weight_decay if decays else 0.0
        groups.setdefault(settings, []).append(parameter)
    return DenseAdam(
        [
            {"params": group, "l2": coefficient, "weight_decay": decay}
            for (coefficient, decay), group in groups.items()
        ],
        lr=scaled.dense_lr,
        betas=dense.betas,
        eps=dense.eps,
        eps_placement=dense.eps_placement,
    )


def learning_rates(
    config: Config, full: Hyperparameters, step: int, steps_per_epoch: float, total_steps: int
) -> tuple[float, float]:
    """The tables' and the dense layers' rate after `step` steps, as fractions of `full`."""
    optim, where = config.optim, (step, steps_per_epoch, total_steps)
    return (
        learning_rate(optim.embedding.schedule.as_schedule(), full.embedding_lr, *where),
        learning_rate(optim.dense.schedule.as_schedule(), full.dense_lr, *where),
    )
