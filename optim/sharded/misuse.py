"""Ways to train that would silently falsify the counts or the scale of gradients."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.optim.optimizer import register_optimizer_step_post_hook


class MisuseGuard:
    """Refuses loss scaling and gradient accumulation when the first such update is asked for.

    Args:
        one_backward_per_step: refuse a second backward pass without a step of any torch optimizer
            in between. A program that has no gradients for one is left alone.

    Attributes:
        passes: backward passes of one step; Helen takes two.
    """

    def __init__(self, one_backward_per_step: bool = True) -> None:
        self._one_backward_per_step = one_backward_per_step
        self.passes = 1
        self._since_step: dict[int, int] = {}
        self._optimizers_step = False
        self._first_gradients: dict[int, tuple[int, int]] | None = None
        _watch_grad_scalers()
        if one_backward_per_step:
            # The hook is global; it must not keep the model alive.
            this = weakref.ref(self)
            handle = register_optimizer_step_post_hook(lambda *_: _stepped(this))
            weakref.finalize(self, handle.remove)

    def before_update(self, collections: Iterable[int]) -> None:
        """Called once per backward pass, before any table is changed.

        Args:
            collections: numbers of the collections that are to be updated.

        Raises:
            ValueError: the gradients are scaled, or accumulated over several passes.
        """
        _scaled_pass.refuse()
        again = any(self._since_step.get(number, 0) >= self.passes for number in collections)
        if again and (self._optimizers_step or self._gradients_pile_up()):
            raise ValueError(
                "the tables were asked for a second update without an optimizer step in between: "
                "gradient accumulation would falsify the counts and thresholds of CowClip (and "
                "semi-synchronous pipelines use rows that are not current). Make the batch larger "
                "instead, or, if the dense layers are meant to be trained less often, pass "
                "cowclip_sharders(one_backward_per_step=False)"
            )

    def after_update(self, collections: Iterable[int]) -> None:
        """Called once per backward pass that has changed the tables."""
        is_first = not self._since_step and not self._optimizers_step
        for number in collections:
            self._since_step[number] = self._since_step.get(number, 0) + 1
        if is_first and self._one_backward_per_step:
            self._first_gradients = _optimizers_gradients()

    def _gradients_pile_up(self) -> bool:
        """Whether this pass added to gradients that an optimizer is to use, before any was used.

        Looked at once, in the second pass of a program that has not stepped an optimizer yet.
        """
        first, self._first_gradients = self._first_gradients, None
        if not self._one_backward_per_step or first is None:
            return False
        now = _optimizers_gradients()
        return any(now.get(param, seen) != seen for param, seen in first.items())

    def after_step(self) -> None:
        """Called after a step of any torch optimizer."""
        # Only optimizers that step after our updates tell anything about the loop.
        self._optimizers_step |= bool(self._since_step)
        self._since_step = {}


def _optimizers_gradients() -> dict[int, tuple[int, int]]:
    """Gradients of all parameters of all torch optimizers: what changes when one is added to."""
    found = {}
    for optimizer in gc.get_objects():
        if not issubclass(type(optimizer), torch.optim.Optimizer):
            continue
        # One whose constructor raised has no groups, and stays alive while its traceback does.
        for group in getattr(optimizer, "param_groups", ()):
            for param in group["params"]:
                grad = getattr(param, "grad", None) if type(param) is not ShardedTensor else None
                if grad is not None:
                    found[id(param)] = (id(grad), grad._version)
    return found


def _stepped(guard: weakref.ref[MisuseGuard]) -> None:
    alive = guard()
    if alive is not None:
        alive.after_step()


class _ScaledPass:
    """The latest backward pass that began at a loss scaled by a `GradScaler`."""

    def __init__(self) -> None:
        self._graph_task = -1
        self._scaler: torch.amp.GradScaler | None = None

    def begin(self, scaler: torch.amp.GradScaler) -> None:
        """Called from within such a pass."""
        self._graph_task, self._scaler = torch._C._current_graph_task_id(), scaler

    def refuse(self) -> None:
        """Refuse it, if it is the pass under way; the tables' gradients are never unscaled."""
        if self._scaler is None or self._graph_task != torch._C._current_graph_task_id():
            return
        scale = self._scaler.get_scale()
        if scale != 1.0:
            raise ValueError(
                f"a GradScaler scales the loss by {scale:g}, but tables are updated in backward, "
                "before it could unscale their gradients; train in bf16 or fp32 without a scaler"
            )


_scaled_pass = _ScaledPass()


def _watch_grad_scalers() -> None:
    """Make scaled losses known to `_scaled_pass`, which no hook of torch does; once per class.

    Other losses in the same program may be scaled; only those that reach the tables count.
    """
    kinds: list[type[torch.amp.GradScaler]] = [torch.amp.GradScaler]
    for kind in kinds:
        kinds += kind.__subclasses__()
        scale = vars(kind).get("scale")
        if scale is not None and not hasattr(scale, "_stampede_watched"):
            kind.scale = _watched(scale)


def _watched(scale: Any) -> Any:
    @functools.wraps(scale)
    def watched(self: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        return _note(self, scaled) if self.is_enabled() else scaled

    watched._stampede_watched = True
    return watched


def _note(scaler: torch.amp.GradScaler, scaled: Any) -> Any:
    if isinstance(scaled, Tensor):
        if scaled.requires_grad:
            scaled.register_hook(lambda _: _scaled_pass.begin(scaler))
        return scaled
    noted: Iterable[Any] = (_note(scaler, one) for one in scaled)
    return type(scaled)(noted) if isinstance(scaled, list | tuple) else noted
