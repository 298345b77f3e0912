# pyright: basic
"""Losses and gradients that are not finite: the error, and a flag read without waiting."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

# Steps after which a queued flag is read. By then the device is done with it, or so far behind
# that waiting costs nothing.
LATE = 4


class NonFiniteGradientError(ValueError):
    """A NaN or an infinity in a gradient; no table of the same update was changed.

    Args:
        message: what was found.
        ago: how many steps before the newest one it was found; 0 for the newest.
    """

    def __init__(self, message: str, ago: int = 0) -> None:
        super().__init__(message)
        self.ago = ago


class NonFiniteFlag:
    """A flag for values that are not finite; set on the device, read by the host a little later.

    Once it is set the kernels write nothing, so the tables stay as before that step. `tensor` is
    `[1]` int32 on the device; 0 while everything was finite.
    """

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros(1, dtype=torch.int32, device=device)
        # Steps, their flags on the host, and when these have arrived there.
        self._queued: deque[tuple[int, Tensor, torch.Event | torch.cuda.Event | None]] = deque()

    @property
    def unread(self) -> set[int]:
        """The steps whose flag has not arrived yet."""
        return {step for step, _, _ in self._queued}

    def mark(self, values: Tensor) -> None:
        """Set the flag if a value is not finite."""
        self.tensor += (~torch.isfinite(values)).any()

    def found_inf(self) -> Tensor:
        """`[1]` float32, 1 if it is set: torch's fused optimizers then change nothing."""
        return (self.tensor > 0).float()

    def end_step(self, step: int) -> None:
        """Send the flag to the host once the kernels queued so far are done."""
        copied = None
        if self.tensor.is_cuda:
            value = torch.empty(1, dtype=torch.int32, pin_memory=True)
            value.copy_(self.tensor, non_blocking=True)
            copied = torch.cuda.current_stream().record_event()
        else:
            value = self.tensor.clone()
        self._queued.append((step, value, copied))

    def bad_step(self, *, up_to_now: bool = False) -> int | None:
        """The first step that was not finite, if its flag has arrived; then the flag is cleared.

        All ranks get the same answer in the same step, however far their devices are.

        Args:
            up_to_now: wait for all steps that were queued.
        """
        while len(self._queued) > (0 if up_to_now else LATE):
            step, value, copied = self._queued.popleft()
            if copied is not None:
                copied.synchronize()
            if value.item():
                self._queued.clear()
                self.tensor.zero_()
                return step
        return None
