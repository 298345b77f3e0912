"""Gradients that cannot be differentiated again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import function


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the backward of an autograd function: with `create_graph` it raises an error.

    torch's own decorator raises one only if the incoming gradient requires a gradient; else what it
    returns is without a graph, and a penalty of gradients would be one of constants.
    """
    once = function.once_differentiable(backward)

    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the gradient of these layers cannot be differentiated again, but "
                "create_graph=True was asked for"
            )
        return once(ctx, *grads)

    return checked
