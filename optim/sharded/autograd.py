"""Forward and backward of lookups in fused tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stampede.optim.sharded.lookups import LookupGradient

if TYPE_CHECKING:
    from stampede.optim.sharded.backward_update import BackwardUpdate
    from stampede.optim.sharded.tables import CowClipTables


class LookUp(torch.autograd.Function):
    """The lookup, with the hand-in of its gradient as backward."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        tbe: CowClipTables,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None,
    ) -> Tensor:
        """The lookup's output."""
        # `anchor` requires a gradient, so that autograd calls backward; it is given none.
        ctx.tbe = tbe
        ctx.version = tbe.version
        ctx.is_within_backward = torch._C._current_graph_task_id() != -1
        indices, offsets, per_sample_weights = tbe.checked(indices, offsets, per_sample_weights)
        # Saved too, so that autograd sees if they are written over before backward.
        ctx.save_for_backward(indices, offsets, per_sample_weights)
        ctx.parts = tbe.parts(indices, offsets, per_sample_weights)
        return tbe.lookup(ctx.parts, indices, offsets, per_sample_weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Hands the gradient in, see `BackwardUpdate`; gives that of per-sample weights."""
        tbe = ctx.tbe
        if ctx.version != tbe.version:
            raise ValueError(
                "tables with CowClip: these rows were looked up before the last update, so their "
                "gradient is not that of the current weights. Semi-synchronous and prefetching "
                "pipelines, and a second backward of one forward, are not supported; use "
                "TrainPipelineSparseDist, or look up again after each backward"
            )
        if ctx.is_within_backward:
            # Its rows would be updated apart from those of the pass around it.
            raise ValueError(
                "tables with CowClip: a lookup was repeated in a backward pass of its own; write "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        per_sample_weights = ctx.saved_tensors[2]
        # Not to be held as long as the loss is.
        parts, ctx.parts = ctx.parts, None
        lookup = LookupGradient(parts, grad)
        of_weights = None
        if ctx.needs_input_grad[4]:
            of_weights = tbe.gradient_of_sample_weights(lookup).to(per_sample_weights.dtype)
        tbe.owner.deliver(tbe, lookup)
        return None, None, None, None, of_weights


def tell_when_reached(
    output: Tensor, owner: BackwardUpdate, number: int, module: int = 0
) -> Tensor:
    """Have a backward pass that goes through the output of a lookup module tell its owner.

    The output stays one that may be changed in place.

    Args:
        number, module: see `BackwardUpdate.reach`.
    """
    if not output.requires_grad:
        return output
    if output.grad_fn is None:
        # A rank without tables may give a leaf, which no pass goes through.
        output = output.view_as(output)
    output.grad_fn.register_prehook(lambda _: owner.reach(number, module))
    return output
