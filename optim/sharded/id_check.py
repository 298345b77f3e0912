"""Ids outside of their tables, named by feature and table."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from stampede.optim import native


class Use(NamedTuple):
    """A feature that looks up a table of some rows."""

    feature: str
    table: str
    rows: int


def refuse_no_id(ids: Tensor, bounds: Sequence[int], uses: Sequence[Use]) -> None:
    """Refuse ids of -1, which FBGEMM's check takes for rows that were pruned.

    Args:
        ids: of a lookup, feature after feature.
        bounds: where the ids of each feature begin, and their end.
    """
    found = (ids == -1).nonzero()
    if len(found):
        use = uses[bisect_right(bounds, int(found[0])) - 1]
        raise IndexError(
            f"id -1 of feature {use.feature!r} is no row of table {use.table!r}, whose ids are 0 "
            f"to {use.rows - 1}; leave the bag of a sample without an id empty (length 0), or give "
            "such samples a row of their own"
        )


class CheckBeforeSending:
    """Checks ids on the rank that has them, where ranks own rows: a hook before the exchange.

    TorchRec would send an id outside of its table to some rank as a row outside of its shard, and
    FBGEMM would take the first row of that shard. This way it takes the first row of the table, or
    refuses the id, as on one process.

    Args:
        uses: the features of the exchange, in its order.
        modes: FBGEMM's, of each feature; the strictest is taken for all.
    """

    def __init__(self, uses: Sequence[Use], modes: Sequence[BoundsCheckMode]) -> None:
        self._uses = uses
        kinds = [BoundsCheckMode[mode.name.removeprefix("V2_")] for mode in modes]
        self._mode = min(kinds, key=lambda mode: mode.value)
        rows = torch.tensor([use.rows for use in uses])
        self._rows, self._ends = rows, rows.cumsum(0)
        self._warning = torch.zeros(1, dtype=torch.int64)

    @torch.compiler.disable(reason="ids are checked outside compiled graphs")
    def __call__(self, _: nn.Module, inputs: tuple[KeyedJaggedTensor]) -> None:
        """Check a batch."""
        if self._mode == BoundsCheckMode.NONE:
            return
        ids, bounds = inputs[0].values(), inputs[0].offset_per_key()
        # Each feature's ids are one bag here.
        offsets = torch.tensor(bounds, dtype=ids.dtype)
        if native.available() and torch.ops.stampede.is_sound(
            ids, offsets, self._ends - self._rows, int(self._ends[-1])
        ):
            return
        refuse_no_id(ids, bounds, self._uses)
        torch.ops.fbgemm.bounds_check_indices(
            self._rows, ids, offsets, self._mode.value, self._warning
        )
