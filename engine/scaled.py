"""The configured settings, scaled from the base batch size to the actual one."""

from __future__ import annotations

from stampede.engine.config import Config
from stampede.optim import Hyperparameters, Scaled, scale


def scaled_hyperparameters(config: Config) -> Scaled:
    """Settings as configured for the base batch size, and for the actual one."""
    base = Hyperparameters(
        embedding_lr=config.optim.embedding.lr,
        # FBGEMM's Adam has none.
        embedding_l2=getattr(config.optim.embedding, "l2", 0.0),
        dense_lr=config.optim.dense.lr,
    )
    scaling = config.optim.scaling
    return scale(base, scaling.rule, config.train.batch_size, scaling.base_batch_size)
