# pyright: basic
"""FBGEMM's fused tables; their backward keeps the gradients for the update after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

from stampede.optim import triton
from stampede.optim.backends.torch import TorchBackend
from stampede.optim.lookup import LookedUpGradients, Lookup
from stampede.optim.rows import RowGradients
from stampede.optim.sharded.id_check import Use, refuse_no_id
from stampede.optim.sharded.parameters import CurrentParameter, kept_current
from stampede.optim.table_array import TableArray, TableShard
from stampede.optim.update_settings import UpdateSettings

# A table of FBGEMM: rows, columns, place.
_Spec = tuple[int, int, EmbeddingLocation, ComputeDevice]

NOT_COMPILED = (
    "tables with CowClip are looked up outside compiled graphs; write fullgraph=False, or compile "
    "the dense part of the model only"
)


def _refuse_gradient(names: list[str], sizes: list[int], weights: Tensor) -> None:
    """Refuse a gradient that autograd has left at the weights of a TBE's tables."""
    grad, weights.grad = weights.grad, None
    assert grad is not None
    for name, part in zip(names, grad.split(sizes), strict=True):
        # Some programs add 0 times every parameter to the loss.
        if part.any():
            raise ValueError(
                f"table {name!r} with CowClip: a gradient reached its weights outside of the "
                "lookup (a tied softmax, a penalty in the loss), where its optimizer does not see "
                "it; look the rows up by their ids, write l2 in the optimizer's arguments instead "
                "of a penalty, or detach() the weights"
            )


class ArrayPlace(NamedTuple):
    """The features of an array, their columns in the output, and their tables' first rows."""

    features: slice
    columns: slice
    first_rows: Tensor


class ArrayLookup(NamedTuple):
    """One array's part of a lookup: positions of its ids, columns of its output."""

    backend: TorchBackend
    positions: slice
    columns: slice
    lookup: Lookup

    def of(self, output: Tensor) -> Tensor:
        """This array's part of the lookup's output, or of its gradient."""
        return output[:, self.columns] if self.lookup.pooled else output[self.positions]


class LookupGradient(NamedTuple):
    """What a lookup's backward leaves for the update."""

    parts: list[ArrayLookup]
    grad: Tensor  # `[batch, columns]` of the pooled output, or `[ids, columns]` of a sequence.
    # On a GPU, the event at the end of backward; the update may run on another stream.
    ready: torch.Event | torch.cuda.Event | None

    def wait(self) -> None:
        """Make the current stream wait for the gradient and keep its memory until done."""
        if self.ready is not None:
            here = torch.cuda.current_stream()
            here.wait_event(self.ready)
            self.grad.record_stream(here)
            for part in self.parts:
                part.lookup.record_stream(here)


class _LookUp(torch.autograd.Function):
    """A lookup; its backward keeps the gradient for the update."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        tbe: CowClipTables,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None,
    ) -> Tensor:
        # `anchor` requires a gradient only to make autograd call backward.
        ctx.tbe = tbe
        ctx.version = tbe.version
        ctx.is_within_backward = torch._C._current_graph_task_id() != -1
        if tbe.is_checked_first:
            # Ids are sorted before FBGEMM's own lookup would check them.
            indices, offsets, per_sample_weights = tbe.checked(indices, offsets, per_sample_weights)
        # Saved so that autograd notices if they are overwritten before backward.
        ctx.save_for_backward(indices, offsets, per_sample_weights)
        ctx.parts = tbe.parts(indices, offsets, per_sample_weights)
        return tbe.lookup(ctx.parts, indices, offsets, per_sample_weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tbe = ctx.tbe
        if ctx.version != tbe.version or ctx.parts is None:
            raise ValueError(
                "tables with CowClip: these rows were looked up before the last update, so their "
                "gradient does not belong to the current weights. Semi-synchronous and "
                "prefetching pipelines, and a second backward of one forward, are not supported; "
                "use TrainPipelineSparseDist, or look up again after each backward"
            )
        if ctx.is_within_backward:
            # The inner pass would update its rows separately from the outer pass.
            raise ValueError(
                "tables with CowClip: a lookup was recomputed in a nested backward pass; write "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        per_sample_weights = ctx.saved_tensors[2]
        parts = ctx.parts
        if not tbe.is_frozen:
            # Freed now, not when the loss is.
            ctx.parts = None
        of_weights = None
        if ctx.needs_input_grad[4]:
            of_weights = tbe.gradient_of_sample_weights(parts, grad).to(per_sample_weights.dtype)
        if not tbe.is_frozen:
            ready = torch.cuda.current_stream().record_event() if grad.is_cuda else None
            tbe.gradients.append(LookupGradient(parts, grad, ready))
        return None, None, None, None, of_weights


class CowClipTables(SplitTableBatchedEmbeddingBagsCodegen):
    """A TBE (table-batched embedding) whose tables are updated by an optimizer with CowClip.

    The lookup returns what FBGEMM's does. Backward receives the gradient of its output, already the
    mean over the global batch, and keeps it for the model's `BackwardUpdate`.

    Args:
        shards, widths: of the tables, with their columns, in order.
        dim: columns of a whole table, which the clip scales by.
        of_fbgemm: arguments of FBGEMM's class.

    Attributes:
        arrays: the tables with their state; consecutive tables of the same first column and width
            share an array.
        is_frozen: whether no row ever changes; backward then keeps nothing.
        step_count: int64 scalar on the CPU, steps taken so far.
        row_counts: int64 `[3]`, touched, clipped and skipped rows since the start of the run.
    """

    arrays: list[TableArray]
    features: list[str]  # Names of the features, for messages.
    places: list[ArrayPlace]
    # Buffers of FBGEMM's class.
    weights_host: Tensor
    weights_dev: Tensor
    hash_size_cumsum: Tensor
    weights_physical_offsets: list[int]
    backends: list[TorchBackend]  # Kernels of each array, chosen when the collection is sharded.
    gradients: list[LookupGradient]  # Left by backward passes for the update.
    is_replicated: bool  # Whether every rank holds a copy, and gradients must be exchanged.
    # Their optimizer in TorchRec, and the rate that was last found there.
    of_torchrec: Callable[[], torch.optim.Optimizer | None] = staticmethod(lambda: None)
    seen_rate: float | None = None
    step_count: Tensor
    version: int = 0  # Number of updates; a lookup with an older one is out of date.
    updated: torch.Event | torch.cuda.Event | None = None  # On a GPU, the end of the last update.
    row_counts: Tensor
    settle: Callable[[], None] | None = None  # Raises the errors of queued steps.

    def __init__(
        self,
        shards: Sequence[TableShard],
        widths: Sequence[int],
        settings: UpdateSettings,
        dim: int,
        *,
        device: torch.device,
        features: Sequence[str] = (),
        is_replicated: bool = False,
        **of_fbgemm: Any,
    ) -> None:
        self._widths = list(widths)
        self.is_frozen = settings.rule.is_frozen
        on_gpu = device.type == "cuda"
        place = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
        kind = ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU
        # FBGEMM's constructor takes multiples of 4 only; see `_apply_split`.
        specs: list[_Spec] = [
            (shard.rows, -(-n // 4) * 4, place, kind)
            for shard, n in zip(shards, widths, strict=True)
        ]
        super().__init__(specs, device=device, **of_fbgemm)
        flat = self._stored().detach()
        self.arrays, self.places = [], []
        first = table = feature = column = 0
        for (_, columns), run in groupby(
            zip(shards, widths, strict=True), key=lambda t: (t[0].column_offset, t[1])
        ):
            run_shards = [shard for shard, _ in run]
            size = sum(shard.rows for shard in run_shards) * columns
            weights = flat[first : first + size].view(-1, columns)
            self.arrays.append(TableArray.create(run_shards, weights, settings, dim))
            first += size
            table += len(run_shards)
            of_run = slice(feature, sum(t < table for t in self.feature_table_map))
            stop = column + (of_run.stop - feature) * columns
            first_rows = self.hash_size_cumsum[of_run] - self.hash_size_cumsum[feature]
            self.places.append(ArrayPlace(of_run, slice(column, stop), first_rows))
            feature, column = of_run.stop, stop
        if self._stored().requires_grad:
            names = [shard.table.rpartition(".")[2] for shard in shards]
            sizes = [shard.rows * width for shard, width in zip(shards, widths, strict=True)]
            self._stored().register_post_accumulate_grad_hook(
                partial(_refuse_gradient, names, sizes)
            )
        self.features = list(features) or [str(n) for n in range(len(self.feature_table_map))]
        self.backends, self.gradients = [], []
        self.is_replicated = is_replicated
        self.step_count = torch.zeros((), dtype=torch.int64)
        self.row_counts = torch.zeros(3, dtype=torch.int64, device=flat.device)

    def _apply_split(self, split: Any, prefix: str, *rest: Any, **named: Any) -> None:
        """FBGEMM's constructor allocates the weights: in the tables' own widths.

        Only its GPU kernels need multiples of 4 (meta-pytorch/torchrec#1495 asks for others), and
        ours take their place.
        """
        if prefix == "weights":
            specs = zip(self.embedding_specs, self._widths, strict=True)
            self.embedding_specs = [(rows, n, place, kind) for (rows, _, place, kind), n in specs]
            self.dims = self._widths
            feature_dims = [self.dims[table] for table in self.feature_table_map]
            self.total_D, self.max_D = sum(feature_dims), max(self.dims)
            self.D_offsets = self.D_offsets.new_tensor([0, *accumulate(feature_dims)])
            self.feature_dims = self.feature_dims.new_tensor(feature_dims)
            sizes = [rows * n for rows, n, *_ in self.embedding_specs]
            *offsets, size = accumulate(sizes, initial=0)
            split = split._replace(offsets=offsets)
            split = split._replace(**{"host_size" if self.use_cpu else "dev_size": size})
        super()._apply_split(split, prefix, *rest, **named)

    def get_learning_rate(self) -> float:
        """The rate of the next step: the optimizer's, if a schedule has changed it there.

        TorchRec hands it over only in `fused_optimizer.step()` and `zero_grad()`.
        """
        optimizer = self.of_torchrec()
        if optimizer is not None:
            rate = float(optimizer.param_groups[0]["lr"])
            if rate != self.seen_rate:
                self.set_learning_rate(rate)
                self.seen_rate = rate
        return super().get_learning_rate()

    def update_hyper_parameters(self, params_dict: dict[str, float]) -> None:
        """Set the learning rate, `lr`; see FBGEMM's class.

        Raises:
            ValueError: another setting is given, which would have no effect.
        """
        others = sorted(set(params_dict) - {"lr"})
        if others:
            raise ValueError(
                f"tables with CowClip: update_hyper_parameters got {', '.join(others)}, but only "
                "lr can be changed after sharding; give others to apply_optimizer_in_backward"
            )
        super().update_hyper_parameters(params_dict)

    def rewind(self, step: int) -> None:
        """Undo the count of steps after `step`, which were queued but not taken."""
        self.step_count.fill_(step)
        for backend in self.backends:
            backend.rewind(step)

    @torch.no_grad()
    def flush(self) -> None:
        """Bring all rows up to date. All ranks must call it together, as a `state_dict` does.

        Raises:
            NonFiniteGradientError: a step that was queued on a GPU was not finite.
        """
        super().flush()
        if self.updated is not None:
            torch.cuda.current_stream().wait_event(self.updated)
        if self.settle is not None:
            self.settle()
        for backend in self.backends:
            backend.flush()

    def weights_tensor(self) -> Tensor:
        """All weights in one dimension, up to date, on the device that holds them."""
        self.flush()
        return self._stored()

    def _stored(self) -> Tensor:
        return self.weights_host if self.weights_host.numel() else self.weights_dev

    # FBGEMM's own lookup also breaks a graph on a CPU.
    @torch.compiler.disable(reason=NOT_COMPILED)
    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        """Embeddings; see FBGEMM's class for arguments and shapes."""
        if self.updated is not None:
            torch.cuda.current_stream().wait_event(self.updated)
        # Backward must also reach ranks without rows, whose weights require no gradient: the
        # collectives around it run on all ranks.
        anchor = torch.empty(0, requires_grad=True)
        return _LookUp.apply(anchor, self, indices, offsets, per_sample_weights)

    @property
    def is_checked_first(self) -> bool:
        """Whether ids are checked before their rows are brought up to date."""
        return self.is_on_gpu or any(backend.needs_checked_ids for backend in self.backends)

    @property
    def is_on_gpu(self) -> bool:
        """Whether reading a value from the device is to be avoided."""
        # Triton's interpreter stands for a GPU.
        return self.row_counts.is_cuda or triton.handles(self.row_counts)

    def checked(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The inputs after FBGEMM's check, which replaces ids outside their table and says so.

        Raises:
            IndexError: an id is -1, which FBGEMM's check lets pass; on a CPU.
        """
        is_to_check = self.bounds_check_mode_int != BoundsCheckMode.NONE.value
        if is_to_check and self.is_on_gpu:
            # To look for -1 would wait; any other number is replaced.
            indices = indices.masked_fill(indices == -1, -2)
        inputs = self.prepare_inputs(indices, offsets, per_sample_weights)[:3]
        if is_to_check and not self.is_on_gpu:
            shards = [shard for array in self.arrays for shard in array.shards]
            uses = [
                Use(feature, shards[table].table.rpartition(".")[2], shards[table].rows)
                for feature, table in zip(self.features, self.feature_table_map, strict=True)
            ]
            batch = (len(offsets) - 1) // len(uses)
            refuse_no_id(inputs[0], offsets[:: batch or 1].tolist(), uses)
        return inputs

    @torch.no_grad()
    def lookup(
        self,
        parts: list[ArrayLookup],
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None,
    ) -> Tensor:
        """FBGEMM's own lookup, without its backward, where our kernels do not pool."""
        if not self._stored().numel():
            # More ranks than rows: FBGEMM does not know the device of a table without rows.
            return self._output(parts, offsets.device).zero_()
        for part in parts:
            part.backend.catch_up(part.lookup, int(self.step_count))
        mode = self.bounds_check_mode_int
        is_to_check = mode != BoundsCheckMode.NONE.value and not self.is_checked_first
        inputs = indices, offsets, per_sample_weights
        if not self._is_pooled_here():
            inputs = self.checked(*inputs) if is_to_check else inputs
            self.bounds_check_mode_int = BoundsCheckMode.NONE.value
            try:
                return super().forward(*inputs)
            finally:
                self.bounds_check_mode_int = mode
        # FBGEMM's check is slower, but reports errors, and refuses or repairs.
        if is_to_check and not all(part.backend.is_sound(part.lookup) for part in parts):
            self.checked(*inputs)
            if not all(part.backend.is_sound(part.lookup) for part in parts):
                raise IndexError(
                    "the offsets of a lookup do not ascend from 0 to the number of its ids"
                )
        output = self._output(parts, offsets.device)
        for part in parts:
            part.backend.pool_(part.lookup, part.of(output))
        return output.to(SparseType.from_int(self.output_dtype).as_dtype())

    def _is_pooled_here(self) -> bool:
        """Whether our kernels, which are faster, can replace FBGEMM's lookup."""
        if any(backend.must_pool for backend in self.backends):
            return True
        is_usual = self.pooling_mode != PoolingMode.NONE and (
            self.output_dtype == SparseType.FP32.as_int()
        )
        return is_usual and all(backend.pools for backend in self.backends)

    def _output(self, parts: list[ArrayLookup], device: torch.device) -> Tensor:
        """An uninitialised output of a lookup."""
        if self.pooling_mode == PoolingMode.NONE:
            shape = parts[-1].positions.stop, self.embedding_specs[0][1]
        else:
            shape = parts[0].lookup.batch, parts[-1].columns.stop
        return torch.empty(shape, dtype=torch.float32, device=device)

    def take_gradients(self) -> list[LookupGradient]:
        """Take the gradients that the lookups of a pass have left."""
        taken, self.gradients = self.gradients, []
        return taken

    @torch.no_grad()
    def row_gradients(
        self, lookup: LookupGradient, is_queued: bool = False
    ) -> list[RowGradients | LookedUpGradients]:
        """The gradient of one lookup for each array, summed by row unless its update is queued."""
        if is_queued:
            return [LookedUpGradients(part.lookup, part.of(lookup.grad)) for part in lookup.parts]
        return [part.backend.sum_by_row(part.lookup, part.of(lookup.grad)) for part in lookup.parts]

    @torch.no_grad()
    def gradient_of_sample_weights(self, parts: list[ArrayLookup], grad: Tensor) -> Tensor:
        """`[ids]` float32: the gradient of the per-sample weights of a lookup."""
        if self.pooling_mode == PoolingMode.NONE:
            # Sequences are not weighted.
            return torch.zeros(sum(part.lookup.occurrences for part in parts), device=grad.device)
        return torch.cat(
            [part.backend.gradient_of_weights(part.lookup, part.of(grad)) for part in parts]
        )

    def no_gradients(self) -> list[RowGradients]:
        """The row gradients of a batch without ids, for each array."""
        none = torch.zeros(0, dtype=torch.int64, device=self.row_counts.device)
        return [
            RowGradients(none, none.new_zeros(0, array.weights.shape[1], dtype=torch.float32), none)
            for array in self.arrays
        ]

    def parts(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None
    ) -> list[ArrayLookup]:
        """Split a lookup into the part of each array."""
        batch = (offsets.numel() - 1) // len(self.feature_table_map)
        # With one array, the offsets need not be copied from the device.
        cuts = [0, indices.numel()]
        if len(self.places) > 1:
            ends = [0, *(place.features.stop for place in self.places)]
            cuts = offsets[[batch * feature for feature in ends]].tolist()
        parts = []
        for backend, place, (first, stop) in zip(
            self.backends, self.places, pairwise(cuts), strict=True
        ):
            bags = offsets[place.features.start * batch : place.features.stop * batch + 1]
            positions = slice(first, stop)
            lookup = Lookup(
                indices[positions],
                bags - first if first else bags,
                place.first_rows,
                len(backend.array.weights),
                pooled=self.pooling_mode != PoolingMode.NONE,
                mean=self.pooling_mode == PoolingMode.MEAN,
                per_sample_weights=(
                    None if per_sample_weights is None else per_sample_weights[positions]
                ),
            )
            parts.append(ArrayLookup(backend, positions, place.columns, lookup))
        return parts

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        """All states of each table by name, views; see FBGEMM's class."""
        return [states for _, states in self.shard_states()]

    def split_optimizer_states(self) -> list[list[Tensor]]:
        """All states of each table, views; see FBGEMM's class."""
        return [list(states.values()) for _, states in self.shard_states()]

    def split_embedding_weights(self, *arguments: Any, **options: Any) -> list[Tensor]:
        """Weights of each table, up to date whenever they are used; see FBGEMM's class."""
        parts = super().split_embedding_weights(*arguments, **options)
        return [kept_current(part, self.flush) for part in parts]

    def parameter(self, table: int, shards: int = 1) -> CurrentParameter:
        """A table's shards, consecutive ones from `table` on, as a parameter; always up to date."""
        rows, columns = self.embedding_specs[table][:2]
        first = self.weights_physical_offsets[table]
        size = shards * rows * columns
        found: Any = CurrentParameter(self._stored(), first, first + size, -1, columns)
        found._flush = self.flush
        return found

    @torch.no_grad()
    def reset_embedding_weight_momentum(
        self,
        pruned_indices: Tensor,
        pruned_indices_offsets: Tensor,
        logical_table_ids: Tensor,
        buffer_ids: Tensor,
    ) -> None:
        """Reset rows that now belong to other ids: weights and states become zero.

        Args:
            pruned_indices: `[n]` rows of this rank's shards, in runs.
            pruned_indices_offsets: `[runs + 1]` where each run begins.
            logical_table_ids, buffer_ids: `[tables]` table positions, and the run of each.
        """
        self.flush()
        starts = [(array, first) for array in self.arrays for first in array.starts[:-1]]
        bounds = pruned_indices_offsets.tolist()
        for position, run in zip(logical_table_ids.tolist(), buffer_ids.tolist(), strict=True):
            # TorchRec's managed collision names one table, by its position. ITEP may name several,
            # each by its first feature, as FBGEMM does.
            table = position if len(bounds) == 2 else self.feature_table_map[position]
            array, first = starts[table]
            rows = pruned_indices[bounds[run] : bounds[run + 1]].to(array.weights.device)
            for values in array.all_tensors():
                values.index_fill_(0, rows.long() + first, 0)

    def set_optimizer_step(self, step: int) -> None:
        """Set the number of steps taken; bias corrections and rounding continue from it."""
        self.flush()
        self.step_count.fill_(step)

    def shard_states(self) -> list[tuple[TableShard, dict[str, Tensor]]]:
        """Every table with views of its states, up to date.

        TorchRec's name for the first state of every fused optimizer is `momentum1`.
        """
        self.flush()
        found = []
        for array in self.arrays:
            names = [name if place else "momentum1" for place, name in enumerate(array.states)]
            for shard, (first, stop) in zip(array.shards, pairwise(array.starts), strict=True):
                parts = (state[first:stop] for state in array.states.values())
                found.append((shard, dict(zip(names, parts, strict=True))))
        return found
