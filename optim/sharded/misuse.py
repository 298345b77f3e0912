"""Ways to train that would silently falsify the counts or the scale of gradients."""

from __future__ import annotations

import gc
import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class MisuseGuard:
    """Refuses loss scaling and gradient accumulation when the first such update is asked for.

    Args:
        one_backward_per_step: refuse a second backward pass without a step of any torch optimizer
            in between. A program that never steps one is left alone.
        passes: backward passes of one step (Helen takes two).
    """

    def __init__(self, one_backward_per_step: bool = True, passes: int = 1) -> None:
        self._one_backward_per_step = one_backward_per_step
        self._passes = passes
        self._since_step = 0
        self._optimizers_step = False
        self._looked_for_scaler = False
        if one_backward_per_step:
            # The hook is global; it must not keep the model alive.
            this = weakref.ref(self)
            handle = register_optimizer_step_post_hook(lambda *_: _stepped(this))
            weakref.finalize(self, handle.remove)

    def before_update(self) -> None:
        """Called once per backward pass, before any table is changed.

        Raises:
            ValueError: the gradients are scaled, or accumulated over several passes.
        """
        if not self._looked_for_scaler:
            self._looked_for_scaler = True
            _refuse_grad_scaler()
        self._since_step += 1
        if self._optimizers_step and self._since_step > self._passes:
            raise ValueError(
                "the tables were asked for a second update without an optimizer step in between: "
                "gradient accumulation would falsify the counts and thresholds of CowClip. Make "
                "the batch larger instead, or, if the dense layers are meant to be trained less "
                "often, pass cowclip_sharders(one_backward_per_step=False)"
            )

    def after_step(self) -> None:
        """Called after a step of any torch optimizer."""
        # Only optimizers that step after our updates tell anything about the loop.
        self._optimizers_step |= self._since_step > 0
        self._since_step = 0


def _stepped(guard: weakref.ref[MisuseGuard]) -> None:
    alive = guard()
    if alive is not None:
        alive.after_step()


def _refuse_grad_scaler() -> None:
    """A scaler that has scaled a loss has a scale; the tables' gradients are never unscaled."""
    for found in gc.get_objects():
        if issubclass(type(found), torch.amp.GradScaler) and found._scale is not None:
            scale = found.get_scale()
            if scale != 1.0:
                raise ValueError(
                    f"a GradScaler scales the loss by {scale:g}, but tables are updated in "
                    "backward, before it could unscale their gradients; train in bf16 or fp32 "
                    "without a scaler"
                )
