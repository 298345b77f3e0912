"""Reading trained tables, as a user thinks of them: without the padding they are stored with."""

from __future__ import annotations

from typing import NamedTuple

import torch
from stampede.engine.processes import Processes
from stampede.models import StoredColumns, table_name
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel


class FieldWeights(NamedTuple):
    """Weights of one id field.

    Attributes:
        embedding: `[rows, dim]`.
        first_order: `[rows, 1]`.
    """

    embedding: Tensor
    first_order: Tensor


def read_field(
    model: DistributedModelParallel, field: str, dim: int, processes: Processes
) -> FieldWeights | None:
    """Gather a field's weights on rank 0, on the CPU; all ranks must call it.

    Args:
        model: the sharded model.
        field: name of the id field.
        dim: width of the embedding.

    Returns:
        The weights on rank 0, None elsewhere.

    Raises:
        KeyError: there is no such field.
    """
    key = f"front.ebc.embedding_bags.{table_name(field)}.weight"
    sharded = model.state_dict()[key]
    whole = None
    if processes.is_main:
        whole = torch.empty(sharded.size(), dtype=sharded.dtype, device=processes.device)
    sharded.gather(dst=0, out=whole)
    if whole is None:
        return None
    return FieldWeights(*(part.cpu() for part in StoredColumns(dim).split(whole)))
