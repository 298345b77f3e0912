"""FBGEMM's fused tables, which hand in their rows' gradients in backward."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

from stampede.optim.rows import RowGradients, sum_by_row
from stampede.optim.settings import UpdateSettings
from stampede.optim.table_array import TableArray, TableShard

if TYPE_CHECKING:
    from stampede.optim.sharded.backward_update import BackwardUpdate


class CowClipTables(SplitTableBatchedEmbeddingBagsCodegen):
    """A TBE (table-batched embedding) whose tables are updated by an optimizer with CowClip.

    The lookup is FBGEMM's own; backward receives the gradient of its output, already the mean
    over the global batch, sums it by row and hands it to the `BackwardUpdate` that owns the tables.

    Attributes:
        arrays: the tables with their state; consecutive tables that begin at the same column and
            have one width are one array.
        is_replicated: whether every rank holds a copy, looks up its own part of the batch only and
            must exchange gradients.
        step_count: int64 scalar on the CPU, steps taken so far.
        version: number of updates, by which a lookup knows whether its rows are still current.
        updated: on a GPU, the end of the last update.
        row_counts: int64 `[3]`, touched, clipped and skipped rows since the start of the run.
        owner: collects the gradients of a backward pass.
    """

    arrays: list[TableArray]
    is_replicated: bool
    step_count: Tensor
    version: int
    updated: torch.cuda.Event | None
    row_counts: Tensor
    owner: BackwardUpdate

    @classmethod
    def adopt(
        cls,
        tbe: SplitTableBatchedEmbeddingBagsCodegen,
        shards: list[TableShard],
        settings: UpdateSettings,
        dim: int,
        is_replicated: bool = False,
    ) -> CowClipTables:
        """Turn a freshly built TBE into this class, without a second copy of its weights.

        Args:
            shards: its tables, in order.
            dim: columns of the whole tables.
        """
        tbe.__class__ = cls
        flat = tbe.weights_tensor().detach()
        tbe.arrays = []
        first = 0
        widths = [columns for _, columns, _, _ in tbe.embedding_specs]
        for (_, columns), run in groupby(
            zip(shards, widths, strict=True), key=lambda t: (t[0].column_offset, t[1])
        ):
            run_shards = [shard for shard, _ in run]
            size = sum(shard.rows for shard in run_shards) * columns
            weights = flat[first : first + size].view(-1, columns)
            tbe.arrays.append(TableArray.create(run_shards, weights, settings, dim))
            first += size
        tbe.is_replicated = is_replicated
        tbe.step_count = torch.zeros((), dtype=torch.int64)
        tbe.version = 0
        tbe.updated = None
        tbe.row_counts = torch.zeros(3, dtype=torch.int64, device=flat.device)
        return tbe

    def weights_tensor(self) -> Tensor:
        """All weights in one dimension, on the device that holds them."""
        return self.weights_host if self.weights_host.numel() else self.weights_dev

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        feature_requires_grad: Tensor | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
        **_: Any,
    ) -> Tensor:
        """Embeddings; see FBGEMM's class for arguments and shapes."""
        if batch_size_per_feature_per_rank is not None:
            raise ValueError(
                "tables with CowClip: variable batch size per feature is not supported; "
                "give every feature the same batch size"
            )
        if per_sample_weights is not None and per_sample_weights.requires_grad:
            raise ValueError(
                "tables with CowClip: per-sample weights get no gradient; detach() them before "
                "the lookup"
            )
        if self.updated is not None:
            torch.cuda.current_stream().wait_event(self.updated)
        # Backward must reach also a rank without rows, whose weights require no gradient: the
        # collectives around it run on all ranks.
        anchor = torch.empty(0, requires_grad=True)
        return _Lookup.apply(anchor, self, indices, offsets, per_sample_weights)

    def prefetch(self, *_: Any, **__: Any) -> None:
        """Refused: rows fetched before the previous update would be out of date."""
        raise ValueError(
            "tables with CowClip cannot be prefetched: the rows would be read before the previous "
            "update; use TrainPipelineSparseDist"
        )

    def lookup(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None) -> Tensor:
        """FBGEMM's own lookup, without its backward."""
        if not self.weights_tensor().numel():
            # More ranks than rows: FBGEMM does not know where a table without rows lies.
            return self._nothing(offsets)
        with torch.no_grad():
            if self.weights_tensor().dtype == torch.bfloat16:
                # FBGEMM's lookup knows no bf16 on CPU.
                return self._lookup_in_torch(indices, offsets, per_sample_weights)
            return super().forward(indices, offsets, per_sample_weights)

    def _lookup_in_torch(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None
    ) -> Tensor:
        """The lookup in plain torch, summed in float32."""
        batch = (offsets.numel() - 1) // len(self.feature_table_map)
        features, _ = self._features_and_columns()
        cuts = offsets[[feature * batch for feature in features]].tolist()
        outputs = []
        for array, bounds, cut in zip(self.arrays, pairwise(features), pairwise(cuts), strict=True):
            (first, stop), ids = bounds, slice(*cut)
            lengths = offsets[first * batch : stop * batch + 1].diff()
            starts = self.hash_size_cumsum[first:stop] - self.hash_size_cumsum[first]
            rows = indices[ids] + starts.repeat_interleave(batch).repeat_interleave(lengths)
            values = array.weights[rows].float()
            if self.pooling_mode == PoolingMode.NONE:
                outputs.append(values)
                continue
            if per_sample_weights is not None:
                values = values * per_sample_weights[ids, None]
            pooled = torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)
            if self.pooling_mode == PoolingMode.MEAN:
                pooled = pooled / lengths.clamp_min(1)[:, None]
            by_feature = pooled.view(stop - first, batch, -1)
            outputs.append(by_feature.transpose(0, 1).reshape(batch, -1))
        return torch.cat(outputs, dim=0 if self.pooling_mode == PoolingMode.NONE else 1)

    def _nothing(self, offsets: Tensor) -> Tensor:
        batch = (offsets.numel() - 1) // len(self.feature_table_map)
        pooled = self.pooling_mode != PoolingMode.NONE
        columns = self._features_and_columns()[1][-1] if pooled else self.embedding_specs[0][1]
        return torch.zeros(batch if pooled else 0, columns, device=offsets.device)

    @torch.no_grad()
    def row_gradients(
        self, grad: Tensor, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None
    ) -> list[RowGradients]:
        """Sum the gradient of one lookup's output by row, for each array.

        Args:
            grad: `[batch, columns]` gradient of the pooled output, or `[ids, columns]` of a
                sequence.
            indices, offsets, per_sample_weights: the lookup's input.
        """
        batch = (offsets.numel() - 1) // len(self.feature_table_map)
        features, columns = self._features_and_columns()
        # One array needs no look at the offsets, which lie on the device.
        cuts = [0, indices.numel()]
        if len(self.arrays) > 1:
            cuts = offsets[[feature * batch for feature in features]].tolist()
        pooled = self.pooling_mode != PoolingMode.NONE
        sums = []
        for part, (first, stop) in enumerate(pairwise(features)):
            ids = slice(cuts[part], cuts[part + 1])
            weights = None if per_sample_weights is None else per_sample_weights[ids]
            output = grad[:, columns[part] : columns[part + 1]] if pooled else grad[ids]
            sums.append(
                self._array_gradients(
                    output,
                    indices[ids].to(torch.int64),
                    offsets[first * batch : stop * batch + 1].diff(),
                    self.hash_size_cumsum[first:stop] - self.hash_size_cumsum[first],
                    weights,
                    pooled,
                )
            )
        return sums

    def no_gradients(self) -> list[RowGradients]:
        """What a batch without ids would give, for each array."""
        none = torch.zeros(0, dtype=torch.int64, device=self.row_counts.device)
        return [
            RowGradients(none, none.new_zeros(0, array.weights.shape[1], dtype=torch.float32), none)
            for array in self.arrays
        ]

    def _array_gradients(
        self,
        grad: Tensor,
        ids: Tensor,
        lengths: Tensor,
        first_rows: Tensor,
        per_sample_weights: Tensor | None,
        pooled: bool,
    ) -> RowGradients:
        features = len(first_rows)
        batch = len(lengths) // features
        bags = torch.arange(len(lengths), device=grad.device)
        bags = torch.repeat_interleave(bags, lengths, output_size=ids.numel())
        feature = bags // batch
        rows = ids + first_rows[feature]
        if not pooled:
            return sum_by_row(rows, grad)
        coefficients = None if per_sample_weights is None else per_sample_weights.float()
        if self.pooling_mode == PoolingMode.MEAN:
            share = lengths.float().reciprocal()[bags]
            coefficients = share if coefficients is None else share * coefficients
        source = (bags - feature * batch) * features + feature
        bags_grad = grad.reshape(batch * features, grad.shape[1] // features)
        return sum_by_row(rows, bags_grad, source, coefficients)

    def _features_and_columns(self) -> tuple[list[int], list[int]]:
        """First feature and first output column of every array, and one past the last."""
        features, columns, table = [0], [0], 0
        for array in self.arrays:
            table += len(array.shards)
            here = sum(t < table for t in self.feature_table_map) - features[-1]
            features.append(features[-1] + here)
            columns.append(columns[-1] + here * array.weights.shape[1])
        return features, columns

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        """Element-wise states of each table, views of the tables' shape; the first is momentum1."""
        return [
            {
                "momentum1" if position == 0 else name: state
                for position, (name, state) in enumerate(states.items())
                if state.ndim == 2
            }
            for _, states in self.shard_states()
        ]

    def shard_states(self) -> list[tuple[TableShard, dict[str, Tensor]]]:
        """Every table with views of its states."""
        found = []
        for array in self.arrays:
            for shard, (first, stop) in zip(array.shards, pairwise(array.starts), strict=True):
                found.append((shard, {n: s[first:stop] for n, s in array.states.items()}))
        return found


class _Lookup(torch.autograd.Function):
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
        # `anchor` requires a gradient, so that autograd calls backward; it is given none.
        ctx.tbe = tbe
        ctx.version = tbe.version
        ctx.is_within_backward = torch._C._current_graph_task_id() != -1
        ctx.save_for_backward(indices, offsets, per_sample_weights)
        return tbe.lookup(indices, offsets, per_sample_weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
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
        tbe.owner.deliver(tbe, tbe.row_gradients(grad, *ctx.saved_tensors))
        return None, None, None, None, None


class Reached(torch.autograd.Function):
    """Passes a lookup's output on; tells in backward that the pass goes through the lookup."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, owner: BackwardUpdate, number: int) -> Tensor:
        """The output, for the collection of that number."""
        ctx.owner, ctx.number = owner, number
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The gradient, as it came."""
        ctx.owner.reach(ctx.number)
        return grad, None, None
