"""What the modules of tables ask for that a gradient does not show."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from torch import Tensor, nn


def frozen_rows(params: Sequence[Tensor], optimizer: str) -> dict[Tensor, int | None]:
    """The `padding_idx` of each parameter's module; None where there is none.

    Raises:
        ValueError: a module rescales its gradients or its weights behind the optimizer's back.
    """
    found: dict[Tensor, int | None] = {param: None for param in params}
    by_id = {id(param): param for param in params}
    # A parameter does not know its module, and torch's optimizers are given parameters only.
    for module in gc.get_objects():
        if not issubclass(type(module), (nn.Embedding, nn.EmbeddingBag)):
            continue
        param = by_id.get(id(module._parameters.get("weight")))
        if param is None:
            continue
        shown = f"{optimizer}: a table of shape {tuple(param.shape)} belongs to a module with"
        if module.scale_grad_by_freq:
            raise ValueError(
                f"{shown} scale_grad_by_freq=True, which divides gradients by the counts that the "
                "clip multiplies by; write scale_grad_by_freq=False"
            )
        if module.max_norm is not None:
            raise ValueError(
                f"{shown} max_norm={module.max_norm}, which changes weights outside the "
                "optimizer; write max_norm=None"
            )
        if module.padding_idx is not None:
            found[param] = module.padding_idx
    return found
