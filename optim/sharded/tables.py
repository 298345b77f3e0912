"""FBGEMM's fused tables, which hand in their rows' gradients in backward."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

from stampede.optim import native
from stampede.optim.missed_steps import MissedSteps, can_miss_steps
from stampede.optim.native import kernels
from stampede.optim.rows import RowGradients, sum_by_row
from stampede.optim.settings import UpdateSettings
from stampede.optim.table_array import TableArray, TableShard

if TYPE_CHECKING:
    from stampede.optim.sharded.backward_update import BackwardUpdate


class _ArrayLookup(NamedTuple):
    """The part of a lookup that falls to one array.

    Attributes:
        array: the array.
        positions: of its ids in the lookup.
        columns: of its features in the pooled output.
        ids: `[n]`, rows of their tables.
        offsets: `[features * batch + 1]` where bags begin.
        first_rows: `[features]` int64, first row of each feature's table in the array.
    """

    array: TableArray
    positions: slice
    columns: slice
    ids: Tensor
    offsets: Tensor
    first_rows: Tensor


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
        flat = tbe._stored().detach()
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

    def defer_steps(self) -> None:
        """Let rows that are not in a batch take their steps later, where that is the same."""
        for array in self.arrays:
            if can_miss_steps(array.weights, array.settings):
                array.missed = MissedSteps(array, defers=True)

    def _catch_up(self, indices: Tensor, offsets: Tensor) -> None:
        """Bring the rows of a lookup up to date."""
        waiting = [array.missed for array in self.arrays if array.missed is not None]
        for missed in waiting:
            # It differs where the state was loaded.
            missed.set_step(int(self.step_count))
        if not any(missed.behind for missed in waiting):
            return
        for part in self._parts(indices, offsets):
            if part.array.missed is not None:
                part.array.missed.catch_up(part.array, part.ids, part.offsets, part.first_rows)

    @torch.no_grad()
    def flush(self) -> None:
        """Bring all rows up to date; whoever reads the weights or states directly needs it.

        TorchRec calls it for a `state_dict`.
        """
        super().flush()
        for array in self.arrays:
            if array.missed is not None:
                array.missed.flush(array)

    def weights_tensor(self) -> Tensor:
        """All weights in one dimension, up to date, on the device that holds them."""
        self.flush()
        return self._stored()

    def _stored(self) -> Tensor:
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
        if not self._stored().numel():
            # More ranks than rows: FBGEMM does not know where a table without rows lies.
            return self._nothing(offsets)
        with torch.no_grad():
            self._catch_up(indices, offsets)
            if self._stored().dtype == torch.bfloat16:
                # FBGEMM's lookup knows no bf16 on CPU.
                return self._lookup_in_torch(indices, offsets, per_sample_weights)
            return super().forward(indices, offsets, per_sample_weights)

    def _lookup_in_torch(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None
    ) -> Tensor:
        """The lookup in plain torch, summed in float32."""
        outputs = []
        for part in self._parts(indices, offsets):
            features, lengths = len(part.first_rows), part.offsets.diff()
            batch = len(lengths) // features
            starts = part.first_rows.repeat_interleave(batch).repeat_interleave(lengths)
            values = part.array.weights[part.ids + starts].float()
            if self.pooling_mode == PoolingMode.NONE:
                outputs.append(values)
                continue
            if per_sample_weights is not None:
                values = values * per_sample_weights[part.positions, None]
            pooled = torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)
            if self.pooling_mode == PoolingMode.MEAN:
                pooled = pooled / lengths.clamp_min(1)[:, None]
            by_feature = pooled.view(features, batch, -1)
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
        pooled = self.pooling_mode != PoolingMode.NONE
        sums = []
        for part in self._parts(indices, offsets):
            weights = None if per_sample_weights is None else per_sample_weights[part.positions]
            output = grad[:, part.columns] if pooled else grad[part.positions]
            sums.append(self._array_gradients(part, output, weights))
        return sums

    def no_gradients(self) -> list[RowGradients]:
        """What a batch without ids would give, for each array."""
        none = torch.zeros(0, dtype=torch.int64, device=self.row_counts.device)
        return [
            RowGradients(none, none.new_zeros(0, array.weights.shape[1], dtype=torch.float32), none)
            for array in self.arrays
        ]

    def _array_gradients(
        self, part: _ArrayLookup, grad: Tensor, per_sample_weights: Tensor | None
    ) -> RowGradients:
        array, pooled = part.array, self.pooling_mode != PoolingMode.NONE
        mean = self.pooling_mode == PoolingMode.MEAN
        coefficients = None if per_sample_weights is None else per_sample_weights.float()
        if native.handles(array.weights) and grad.dtype == torch.float32:
            return RowGradients(
                *kernels.sum_lookup(
                    part.ids,
                    part.offsets,
                    part.first_rows,
                    len(array.weights),
                    grad,
                    array.weights.shape[1],
                    pooled=pooled,
                    mean=mean,
                    weights=coefficients if pooled else None,
                )
            )
        bags, features = len(part.offsets) - 1, len(part.first_rows)
        batch, lengths = bags // features, part.offsets.diff()
        bag = torch.arange(bags, device=grad.device)
        bag = torch.repeat_interleave(bag, lengths, output_size=part.ids.numel())
        feature = bag // batch
        rows = part.ids.to(torch.int64) + part.first_rows[feature]
        if not pooled:
            return sum_by_row(rows, grad)
        if mean:
            share = lengths.float().reciprocal()[bag]
            coefficients = share if coefficients is None else share * coefficients
        source = (bag - feature * batch) * features + feature
        bags_grad = grad.reshape(batch * features, grad.shape[1] // features)
        return sum_by_row(rows, bags_grad, source, coefficients)

    def _parts(self, indices: Tensor, offsets: Tensor) -> list[_ArrayLookup]:
        """What of a lookup falls to each array."""
        batch = (offsets.numel() - 1) // len(self.feature_table_map)
        features, columns = self._features_and_columns()
        # One array needs no look at the offsets, which lie on the device.
        cuts = [0, indices.numel()]
        if len(self.arrays) > 1:
            cuts = offsets[[feature * batch for feature in features]].tolist()
        parts = []
        for number, (array, (first, stop)) in enumerate(
            zip(self.arrays, pairwise(features), strict=True)
        ):
            positions = slice(cuts[number], cuts[number + 1])
            parts.append(
                _ArrayLookup(
                    array,
                    positions,
                    slice(columns[number], columns[number + 1]),
                    indices[positions],
                    offsets[first * batch : stop * batch + 1],
                    self.hash_size_cumsum[first:stop] - self.hash_size_cumsum[first],
                )
            )
        return parts

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

    def split_embedding_weights(self, *arguments: Any, **options: Any) -> list[Tensor]:
        """Weights of each table, up to date; see FBGEMM's class."""
        self.flush()
        return super().split_embedding_weights(*arguments, **options)

    def shard_states(self) -> list[tuple[TableShard, dict[str, Tensor]]]:
        """Every table with views of its states, up to date."""
        self.flush()
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
