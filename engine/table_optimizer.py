"""From the configuration to the optimizer of the tables."""

from __future__ import annotations

from typing import Any

import torch

from stampede.engine.config import Config
from stampede.optim import (
    CowClip,
    CowClipAdagrad,
    CowClipAdam,
    CowClipRowWiseAdagrad,
    CowClipRowWiseAdam,
    CowClipSGD,
    Helen,
    Hyperparameters,
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


def table_optimizer(
    config: Config, scaled: Hyperparameters, columns: int, device: torch.device
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Class and arguments for `apply_optimizer_in_backward`.

    Args:
        scaled: the settings for the actual batch size.
        columns: how many columns of a stored row are the embedding; the clip looks at these.
        device: of the tables.

    Raises:
        SettingsError: the device has no such optimizer.
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
    if section.optimizer == "helen":
        return Helen, {**arguments, "columns": columns}
    if section.clip is None:
        arguments["clip"] = CowClip(granularity="none", columns=columns)
    else:
        arguments["clip"] = section.clip.as_clip(columns)
    return _WITH_CLIP[section.optimizer], arguments
