"""FBGEMM's fused tables, which hand in their rows' gradients in backward."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from stampede.optim import native, triton
from stampede.optim.lookup import Lookup
from stampede.optim.missed_steps import MissedSteps, can_miss_steps, is_replayable
from stampede.optim.nonfinite import NonFiniteFlag
from stampede.optim.rows import RowGradients
from stampede.optim.settings import UpdateSettings
from stampede.optim.sharded.autograd import LookUp
from stampede.optim.sharded.lookups import (
    ArrayLookup,
    ArrayPlace,
    LookupGradient,
    gradient_by_row,
    gradient_of_weights,
)
from stampede.optim.sharded.parameters import kept_current
from stampede.optim.sharded.pooling import check_lookup, look_up_in_torch, pool_by_kernel
from stampede.optim.table_array import TableArray, TableShard

if TYPE_CHECKING:
    from stampede.optim.sharded.backward_update import BackwardUpdate


class CowClipTables(SplitTableBatchedEmbeddingBagsCodegen):
    """A TBE (table-batched embedding) whose tables are updated by an optimizer with CowClip.

    The lookup gives what FBGEMM's own does; backward receives the gradient of its output, already
    the mean over the global batch, sums it by row and hands it to the `BackwardUpdate` that owns
    the tables.

    Attributes:
        arrays: the tables with their state; consecutive tables that begin at the same column and
            have one width are one array.
        places: where each array stands in a lookup.
        is_replicated: whether every rank holds a copy, looks up its own part of the batch only and
            must exchange gradients.
        step_count: int64 scalar on the CPU, steps taken so far.
        version: number of updates, by which a lookup knows whether its rows are still current.
        updated: on a GPU, the end of the last update.
        row_counts: int64 `[3]`, touched, clipped and skipped rows since the start of the run.
        owner: collects the gradients of a backward pass; None until it is known.
    """

    arrays: list[TableArray]
    places: list[ArrayPlace]
    is_replicated: bool
    step_count: Tensor
    version: int
    updated: torch.cuda.Event | None
    row_counts: Tensor
    owner: BackwardUpdate | None

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
        tbe.places = tbe._places()
        tbe.is_replicated = is_replicated
        tbe.step_count = torch.zeros((), dtype=torch.int64)
        tbe.version = 0
        tbe.updated = None
        tbe.row_counts = torch.zeros(3, dtype=torch.int64, device=flat.device)
        tbe.owner = None
        return tbe

    def why_not_queued(self) -> str | None:
        """Why the Triton kernels cannot update these tables without a wait for the device.

        None if they can.
        """
        if not triton.handles(self._stored()):
            return "Triton has no GPU here, or is not installed"
        if self.is_replicated:
            return "they are replicated (data_parallel)"
        if len(self.arrays) != 1:
            return "shards of several widths or first columns are looked up together"
        from stampede.optim.triton.update import why_not

        array = self.arrays[0]
        settings = array.settings
        reason = why_not(array)
        if reason is not None:
            return reason
        if settings.clip.by_row and array.width != array.local_width:
            return "their columns are split, so that norms need sums over ranks"
        if settings.moves_untouched_rows and not is_replayable(settings):
            return "rows that no sample has move in a way that cannot be replayed"
        return None

    def defer_steps(self, flag: NonFiniteFlag | None = None) -> None:
        """Let rows that are not in a batch take their steps later, where that is the same.

        Args:
            flag: where updates are queued on a GPU, what forbids them.
        """
        for array in self.arrays:
            if flag is not None and is_replayable(array.settings):
                array.missed = MissedSteps(array, defers=True, flag=flag)
            elif flag is None and can_miss_steps(array.weights, array.settings):
                array.missed = MissedSteps(array, defers=True)

    def rewind(self, step: int) -> None:
        """The steps after `step` were queued but not taken."""
        self.step_count.fill_(step)
        for array in self.arrays:
            if array.missed is not None:
                array.missed.rewind(step)

    def _catch_up(self, parts: list[ArrayLookup]) -> None:
        """Bring the rows of a lookup up to date."""
        for array, _, _, lookup in parts:
            if array.missed is not None:
                # It differs where the state was loaded.
                array.missed.set_step(int(self.step_count))
                array.missed.catch_up(array, lookup)

    @torch.no_grad()
    def flush(self) -> None:
        """Bring all rows up to date; whoever reads the weights or states directly needs it.

        TorchRec calls it for a `state_dict`. With several ranks all must call it at one point.

        Raises:
            NonFiniteGradientError: a step that was queued on a GPU was not finite.
        """
        super().flush()
        if self.updated is not None:
            torch.cuda.current_stream().wait_event(self.updated)
        if self.owner is not None:
            self.owner.check_queued(up_to_now=True)
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
        if self.updated is not None:
            torch.cuda.current_stream().wait_event(self.updated)
        # Backward must reach also a rank without rows, whose weights require no gradient: the
        # collectives around it run on all ranks.
        anchor = torch.empty(0, requires_grad=True)
        return LookUp.apply(anchor, self, indices, offsets, per_sample_weights)

    def prefetch(self, *_: Any, **__: Any) -> None:
        """Refused: rows fetched before the previous update would be out of date."""
        raise ValueError(
            "tables with CowClip cannot be prefetched: the rows would be read before the previous "
            "update; use TrainPipelineSparseDist"
        )

    def checked(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """A lookup's input, where rows are sorted before FBGEMM has looked at their ids.

        On a GPU FBGEMM replaces ids outside their table by 0, and says so.
        """
        if not self._is_checked_first():
            return indices, offsets, per_sample_weights
        return self.prepare_inputs(indices, offsets, per_sample_weights)[:3]

    def _is_checked_first(self) -> bool:
        return any(array.missed is not None and array.missed.is_queued for array in self.arrays)

    @torch.no_grad()
    def lookup(
        self,
        parts: list[ArrayLookup],
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None,
    ) -> Tensor:
        """The lookup: FBGEMM's own, without its backward, where it is not pooled by our kernel.

        Args:
            parts: the same, array by array.
        """
        if not self._stored().numel():
            # More ranks than rows: FBGEMM does not know where a table without rows lies.
            return self._nothing(offsets)
        self._catch_up(parts)
        if self._stored().dtype == torch.bfloat16:
            # FBGEMM's lookup knows no bf16 on CPU.
            return look_up_in_torch(parts)
        mode = self.bounds_check_mode_int
        is_to_check = mode != BoundsCheckMode.NONE.value and not self._is_checked_first()
        if self._is_pooled_by_kernel():
            if is_to_check:
                check_lookup(
                    parts, lambda: self.prepare_inputs(indices, offsets, per_sample_weights)
                )
            return pool_by_kernel(parts)
        if not is_to_check:
            self.bounds_check_mode_int = BoundsCheckMode.NONE.value
        try:
            return super().forward(indices, offsets, per_sample_weights)
        finally:
            self.bounds_check_mode_int = mode

    def _is_pooled_by_kernel(self) -> bool:
        """Whether the C++ kernel gives what FBGEMM's lookup does, which takes longer."""
        return (
            self.pooling_mode != PoolingMode.NONE
            and self.output_dtype == SparseType.FP32.as_int()
            and all(native.handles(array.weights) for array in self.arrays)
        )

    def _nothing(self, offsets: Tensor) -> Tensor:
        batch = (offsets.numel() - 1) // len(self.feature_table_map)
        pooled = self.pooling_mode != PoolingMode.NONE
        columns = self.places[-1].columns.stop if pooled else self.embedding_specs[0][1]
        return torch.zeros(batch if pooled else 0, columns, device=offsets.device)

    @torch.no_grad()
    def row_gradients(self, lookup: LookupGradient) -> list[RowGradients]:
        """Sum the gradient of one lookup's output by row, for each array."""
        pooled = self.pooling_mode != PoolingMode.NONE
        return [
            gradient_by_row(
                part.array,
                part.lookup,
                lookup.grad[:, part.columns] if pooled else lookup.grad[part.positions],
            )
            for part in lookup.parts
        ]

    @torch.no_grad()
    def gradient_of_sample_weights(self, lookup: LookupGradient) -> Tensor:
        """`[ids]` float32: the gradient of the per-sample weights of a lookup."""
        if self.pooling_mode == PoolingMode.NONE:
            # Sequences are not weighted.
            ids = sum(part.lookup.occurrences for part in lookup.parts)
            return torch.zeros(ids, device=lookup.grad.device)
        return torch.cat(
            [
                gradient_of_weights(part.array, part.lookup, lookup.grad[:, part.columns])
                for part in lookup.parts
            ]
        )

    def no_gradients(self) -> list[RowGradients]:
        """What a batch without ids would give, for each array."""
        none = torch.zeros(0, dtype=torch.int64, device=self.row_counts.device)
        return [
            RowGradients(none, none.new_zeros(0, array.weights.shape[1], dtype=torch.float32), none)
            for array in self.arrays
        ]

    def parts(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None
    ) -> list[ArrayLookup]:
        """What of a lookup falls to each array."""
        batch = (offsets.numel() - 1) // len(self.feature_table_map)
        # One array needs no look at the offsets, which lie on the device.
        cuts = [0, indices.numel()]
        if len(self.arrays) > 1:
            ends = [0, *(place.features.stop for place in self.places)]
            cuts = offsets[[batch * feature for feature in ends]].tolist()
        parts = []
        for array, place, (first, stop) in zip(
            self.arrays, self.places, pairwise(cuts), strict=True
        ):
            bags = offsets[place.features.start * batch : place.features.stop * batch + 1]
            positions = slice(first, stop)
            lookup = Lookup(
                indices[positions],
                bags - first if first else bags,
                place.first_rows,
                len(array.weights),
                pooled=self.pooling_mode != PoolingMode.NONE,
                mean=self.pooling_mode == PoolingMode.MEAN,
                per_sample_weights=(
                    None if per_sample_weights is None else per_sample_weights[positions]
                ),
            )
            parts.append(ArrayLookup(array, positions, place.columns, lookup))
        return parts

    def _places(self) -> list[ArrayPlace]:
        found, table, feature, column = [], 0, 0, 0
        for array in self.arrays:
            table += len(array.shards)
            features = slice(feature, sum(t < table for t in self.feature_table_map))
            width = (features.stop - feature) * array.weights.shape[1]
            first_rows = self.hash_size_cumsum[features] - self.hash_size_cumsum[feature]
            found.append(ArrayPlace(features, slice(column, column + width), first_rows))
            feature, column = features.stop, column + width
        return found

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
        """Weights of each table, up to date whenever they are used; see FBGEMM's class."""
        parts = super().split_embedding_weights(*arguments, **options)
        return [kept_current(part, self) for part in parts]

    @torch.no_grad()
    def reset_embedding_weight_momentum(
        self,
        pruned_indices: Tensor,
        pruned_indices_offsets: Tensor,
        logical_table_ids: Tensor,
        buffer_ids: Tensor,
    ) -> None:
        """Begin rows anew, which from now on belong to other ids: weights and states are zero.

        Args:
            pruned_indices: `[n]` rows of this rank's part of the tables, one run for each table.
            pruned_indices_offsets: `[runs + 1]` where each run begins.
            logical_table_ids: `[tables]` positions of tables.
            buffer_ids: `[tables]` the run of each of them.
        """
        self.flush()
        starts = [(array, first) for array in self.arrays for first in array.starts[:-1]]
        bounds = pruned_indices_offsets.tolist()
        for position, run in zip(logical_table_ids.tolist(), buffer_ids.tolist(), strict=True):
            # TorchRec's managed collision asks for one table at a time, by its position; where
            # several can be meant (ITEP), they go by their first feature, as FBGEMM has it.
            table = position if len(bounds) == 2 else self.feature_table_map[position]
            array, first = starts[table]
            rows = pruned_indices[bounds[run] : bounds[run + 1]].to(array.weights.device)
            for values in array.all_tensors():
                values.index_fill_(0, rows.long() + first, 0)

    def set_optimizer_step(self, step: int) -> None:
        """The tables have taken `step` steps: bias corrections and rounding go on from there."""
        self.flush()
        self.step_count.fill_(step)

    def update_hyper_parameters(self, params_dict: dict[str, float]) -> None:
        """Set the learning rate, `lr`.

        Raises:
            ValueError: another parameter is named.
        """
        others = sorted(set(params_dict) - {"lr"})
        if others:
            raise ValueError(
                f"tables with CowClip: {', '.join(others)} cannot be changed while training; only "
                "lr can, set the others in apply_optimizer_in_backward"
            )
        super().update_hyper_parameters(params_dict)

    def shard_states(self) -> list[tuple[TableShard, dict[str, Tensor]]]:
        """Every table with views of its states, up to date."""
        self.flush()
        found = []
        for array in self.arrays:
            for shard, (first, stop) in zip(array.shards, pairwise(array.starts), strict=True):
                found.append((shard, {n: s[first:stop] for n, s in array.states.items()}))
        return found
