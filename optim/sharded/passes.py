"""Backward passes between two steps of a program's optimizers."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Passes:
    """Counts backward passes and says which ones complete a step of the tables.

    Args:
        per_step: how many passes through a collection make one step of its tables; None if each
            pass is a step.

    Attributes:
        updates: of the tables between two optimizer steps; Helen has two.
        complete: called when an optimizer steps, as at the end of an epoch, with the collections
            that have had fewer passes: their tables step with these.
    """

    complete: Callable[[list[int]], None]

    def __init__(self, per_step: int | None = 1) -> None:
        self.per_step = per_step
        self.updates = 1
        # By collection: passes of the current step, and updates since the last optimizer step.
        self._under_way: Counter[int] = Counter()
        self._since_step: Counter[int] = Counter()
        # Whether the loop steps an optimizer after updates; only then are passes limited.
        self._optimizers_step = False
        # The hook is global; it must not keep the model alive.
        this = weakref.ref(self)
        handle = register_optimizer_step_post_hook(lambda *_: _stepped(this))
        weakref.finalize(self, handle.remove)

    def completed(self, collections: Sequence[int]) -> list[int]:
        """Count a pass through collections; return those whose step it completes.

        Raises:
            ValueError: a collection has had its step, and no optimizer has stepped since.
        """
        if self.per_step is None:
            return list(collections)
        if self._optimizers_step and any(self._since_step[n] >= self.updates for n in collections):
            raise ValueError(
                "a backward pass asks for a second update of the tables without an optimizer "
                "step in between. For gradient accumulation write "
                "cowclip_sharders(backwards_per_step=N): gradients and counts of N backward "
                "passes add up. With backwards_per_step=None every pass is an update. "
                "Semi-synchronous pipelines are not supported, as they look up outdated rows"
            )
        self._under_way.update(collections)
        found = [n for n in collections if self._under_way[n] >= self.per_step]
        for number in found:
            del self._under_way[number]
        return found

    def updated(self, collections: Sequence[int]) -> None:
        """The tables of these collections were updated."""
        self._since_step.update(collections)

    def after_step(self) -> None:
        """An optimizer has stepped, which completes the steps under way.

        Raises:
            ValueError: a `GradScaler` called the optimizer.
        """
        if self.per_step is None or not (self._since_step or self._under_way):
            return
        scale = _scale_of_the_loss()
        if scale != 1.0:
            raise ValueError(
                f"a GradScaler scales the loss by {scale:g}, but tables are updated in backward, "
                "before it can unscale their gradients; train in bf16 or fp32 without a scaler"
            )
        cut_short = sorted(self._under_way)
        self._under_way.clear()
        if cut_short:
            self.complete(cut_short)
        self._optimizers_step = True
        self._since_step.clear()


def _stepped(passes: weakref.ref[Passes]) -> None:
    alive = passes()
    if alive is not None:
        alive.after_step()


def _scale_of_the_loss() -> float:
    """The scale of the `GradScaler` that called the optimizer; 1 without one."""
    frame = sys._getframe()
    while frame is not None:
        # Neither the optimizer nor its hooks know the scaler.
        if frame.f_code is torch.amp.GradScaler._maybe_opt_step.__code__:
            return frame.f_locals["self"].get_scale()
        frame = frame.f_back
    return 1.0
