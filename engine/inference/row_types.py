"""Rows of tables as an exported package stores them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from stampede.engine.errors import RunFolderError
from stampede.engine.tables import FieldWeights

RowType = Literal["fp32", "fp16", "int8"]

_INT8 = 127
_CHUNK = 1 << 20


def stored_rows(weights: FieldWeights, kind: RowType, field: str) -> dict[str, Tensor]:
    """Tensors of one table.

    `fp32` is exact. `fp16` rounds each value to 11 bits. `int8` stores an embedding as whole
    numbers times a scale of its row, its largest absolute value / 127, so that no element is off
    by more than half a scale; the first-order weight, one per row, is fp16 there.

    Args:
        field: for the message.

    Returns:
        `embedding` `[rows, dim]`, `first_order` `[rows]`, and for int8 `scale` `[rows]` float32.

    Raises:
        RunFolderError: a weight is too large for fp16.
    """
    embedding, first_order = weights.embedding, weights.first_order.squeeze(1)
    if kind == "fp32":
        return {"embedding": embedding.contiguous(), "first_order": first_order.contiguous()}
    halves = {"first_order": _half(first_order, field)}
    if kind == "fp16":
        return {"embedding": _half(embedding, field), **halves}
    scale = embedding.abs().amax(1) / _INT8
    whole = torch.empty(embedding.shape, dtype=torch.int8)
    for start in range(0, len(embedding), _CHUNK):
        rows = slice(start, start + _CHUNK)
        # A row of zeros has the scale 0.
        by = scale[rows, None].clamp_min(torch.finfo(torch.float32).tiny)
        whole[rows] = (embedding[rows] / by).round().clamp(-_INT8, _INT8).to(torch.int8)
    return {"embedding": whole, "scale": scale, **halves}


def _half(values: Tensor, field: str) -> Tensor:
    halves = values.to(torch.float16, memory_format=torch.contiguous_format)
    if not bool(torch.isfinite(halves).all()):
        largest = values.abs().max().item()
        raise RunFolderError(
            f"field {field}: a weight of {largest:g} is too large for fp16, or not finite; write "
            "--rows fp32"
        )
    return halves
