"""Which of the optimizers that step in this process train the model around the tables."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torchrec.distributed.composable.table_batched_embedding_slice import (
    TableBatchedEmbeddingSlice,
)

_STEPS_OF_SCALER = (
    torch.amp.GradScaler.step.__code__,
    torch.amp.GradScaler._maybe_opt_step.__code__,
)

# So many passes through the tables may show that an optimizer is the model's. Asking costs some
# microseconds for each of its parameters.
_TRIES = 8


@dataclass
class _Known:
    """What is known of an optimizer that has stepped.

    Attributes:
        in_time: whether its first step came when no announced backward pass was missing. One that
            steps more often, such as a discriminator's, does not end the steps of the tables.
        scale: what a `GradScaler` multiplied the loss by.
        is_models: whether it is the model's.
        tries: passes that did not reach its parameters.
    """

    in_time: bool
    scale: float = 1.0
    is_models: bool = False
    tries: int = 0


class ModelOptimizers:
    """Tells the model's optimizers from others: of a discriminator, a teacher, another model.

    An optimizer is the model's if a backward pass through the tables also reaches one of its
    parameters. `register_step_post_hook` would need the optimizer itself, but TorchRec shows a
    sharder the collection without the model around it. So torch's hook for the steps of all
    optimizers tells of them, and each is asked, in the passes after its first step, whose it is.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Optimizer, _Known] = WeakKeyDictionary()
        self.found = False  # Whether there is one.

    def after_step(self, optimizer: Optimizer, in_time: bool) -> _Known:
        """Note a step; `in_time` says whether no announced backward pass is missing."""
        known = self._known.setdefault(optimizer, _Known(in_time))
        known.scale = scale_of_the_loss()
        if known.is_models:
            check_scale(known.scale)
        return known

    def find(self) -> list[_Known]:
        """Ask the running backward pass; those that it shows to be the model's."""
        found = []
        for optimizer, known in list(self._known.items()):
            if known.is_models or known.tries == _TRIES:
                continue
            if not _is_reached(optimizer):
                known.tries += 1
                continue
            known.is_models = self.found = True
            check_scale(known.scale)
            found.append(known)
        return found


def _is_reached(optimizer: Optimizer) -> bool:
    """Whether the running backward pass gives a parameter of an optimizer a gradient."""
    return any(
        torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
        for group in optimizer.param_groups
        for parameter in group["params"]
        # The tables themselves may have been given to it too.
        if parameter.requires_grad and not isinstance(parameter, TableBatchedEmbeddingSlice)
    )


def scale_of_the_loss() -> float:
    """The scale of the `GradScaler` that called the optimizer; 1 without one.

    Neither the optimizer nor the hooks of its step know the scaler, except those of the few kinds
    that unscale gradients themselves (`fused=True`), where it is `optimizer.grad_scale`
    (pytorch/pytorch#123428). No issue asks for more, so the callers are asked: `step`, which calls
    such an optimizer itself, or what a scaler of another class has in its place.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code in _STEPS_OF_SCALER:
            return frame.f_locals["self"].get_scale()
        frame = frame.f_back
    return 1.0


def check_scale(scale: float) -> None:
    """Refuse a scaled loss."""
    if scale != 1.0:
        raise ValueError(
            f"a GradScaler scales the loss by {scale:g}, but tables are updated in backward, "
            "before it can unscale their gradients; train in bf16 or fp32 without a scaler"
        )
