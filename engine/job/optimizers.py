"""Builds both optimizers and their learning rates from the configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from stampede.engine.config import Config
from stampede.models import EmbeddingFront, table_name
from stampede.optim import (
    CowClip,
    CowClipOptimizer,
    DenseAdam,
    FrozenTables,
    Hyperparameters,
    Scaled,
    TableInit,
    learning_rate,
    scale,
)
from stampede.optim.optimizers import optimizer_with


def scaled_hyperparameters(config: Config) -> Scaled:
    """Settings for the base batch size, as configured, and for the actual one."""
    tables = config.optim.embedding
    base = Hyperparameters(tables.lr, tables.l2, config.optim.dense.lr)
    scaling = config.optim.scaling
    return scale(base, scaling.rule, config.train.batch_size, scaling.base_batch_size)


def optimize_tables(config: Config, scaled: Hyperparameters, front: EmbeddingFront) -> None:
    """Give the tables their optimizers, before they are sharded."""
    for table, weights in front.weights().items():
        kind, arguments = table_optimizer(config, scaled, front.columns_of(table).dim, table)
        apply_optimizer_in_backward(kind, [weights], arguments)


def table_optimizer(
    config: Config, scaled: Hyperparameters, columns: int, table: str | None = None
) -> tuple[type[CowClipOptimizer], dict[str, Any]]:
    """Class and arguments for `apply_optimizer_in_backward`, at the actual batch size.

    Args:
        columns: of a stored row, its embedding; these are clipped.
        table: the field whose table it is.
    """
    if table in config.model.frozen:
        return FrozenTables, {}
    section = config.optim.embedding
    arguments = section.model_dump(exclude={"optimizer", "schedule", "plateau", "clip"})
    arguments |= {"lr": scaled.embedding_lr, "l2": scaled.embedding_l2}
    none = CowClip(granularity="none", columns=columns)
    arguments["clip"] = none if section.clip is None else section.clip.built(columns=columns)
    return optimizer_with(section.settings_of), arguments


def table_inits(config: Config, front: EmbeddingFront) -> dict[str, TableInit]:
    """The distribution of the initial values of each table, by its name."""
    return {
        table_name(table): TableInit(
            config.model.init_std, front.columns_of(table).dim, config.run.seed
        )
        for table in front.tables
    }


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


class LearningRates:
    """The rates of the tables and of the dense layers, after each step."""

    def __init__(
        self, config: Config, full: Hyperparameters, steps_per_epoch: float, total_steps: int
    ) -> None:
        optim = config.optim
        self._tables = optim.embedding.schedule.built(), full.embedding_lr
        self._dense = optim.dense.schedule.built(), full.dense_lr
        self._epoch, self._total = steps_per_epoch, total_steps

    def after(self, step: int) -> tuple[float, float]:
        """The tables' and the dense layers' rate after `step` steps."""
        where = step, self._epoch, self._total
        return learning_rate(*self._tables, *where), learning_rate(*self._dense, *where)
