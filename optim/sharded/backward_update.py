# pyright: basic
"""One update of all tables at the end of each backward pass."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import PoolingMode
from torch import nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.keyed import KeyedOptimizer

from stampede.optim import triton
from stampede.optim.lookup import LookedUpGradients, Lookup
from stampede.optim.nonfinite import NonFiniteFlag, NonFiniteGradientError
from stampede.optim.rows import RowGradients, merge_rows
from stampede.optim.sharded.model_optimizers import (
    ModelOptimizers,
    check_scale,
    scale_of_the_loss,
)
from stampede.optim.sharded.reduction import Block, CollectionGroups
from stampede.optim.sharded.tables import CowClipTables
from stampede.optim.table_array import PendingUpdate
from stampede.optim.update import Reduction, update_
from stampede.optim.update_settings import Kernels, UpdateSettings

_LOG = logging.getLogger("stampede.optim")


@dataclass
class _Collection:
    """A sharded collection, held by weak references."""

    module: weakref.ref[nn.Module]
    of_rank: list[weakref.ref[CowClipTables]]
    names: frozenset[str]  # Of its tables in the sums over ranks.
    groups: CollectionGroups
    is_queued: bool  # Whether its updates are queued on a GPU, on all ranks.
    # Row gradients of earlier passes of the current step.
    held: dict[CowClipTables, list[list[RowGradients | LookedUpGradients]]] = field(
        default_factory=dict
    )

    @property
    def tables(self) -> list[CowClipTables]:
        """This rank's tables; empty once the collection is deleted."""
        return [tbe for alive in self.of_rank if (tbe := alive()) is not None]

    def pending_updates(self, is_queued: bool) -> list[tuple[CowClipTables, PendingUpdate]]:
        """The updates of a step; tables that the loss does not depend on have no gradients."""
        pending = []
        for tbe in self.tables:
            passes = self.held.pop(tbe, [])
            passes += (tbe.row_gradients(lookup, is_queued) for lookup in tbe.take_gradients())
            lr, step = tbe.get_learning_rate(), int(tbe.step_count) + 1
            each = zip(*(passes or [tbe.no_gradients()]), strict=True)
            for backend, parts in zip(tbe.backends, each, strict=True):
                batch = parts[0] if len(parts) == 1 else merge_rows(parts)
                if tbe.is_replicated:
                    batch = self.groups.exchange(batch)
                    # Some rows were looked up by other ranks only.
                    size = len(backend.array.weights)
                    backend.catch_up(Lookup.of_rows(batch.rows, size), step - 1)
                pending.append((tbe, PendingUpdate(backend, batch, lr, step)))
        return pending


class BackwardUpdate:
    """Updates the tables at the end of each backward pass; one for each `cowclip_sharders()`.

    A row's step may need sums over other ranks. So one update of all tables runs before
    `backward` returns, with its collectives in an order fixed at sharding.

    Args:
        backwards_per_step: how many passes through a collection make one step of its tables, fewer
            if an optimizer of the model steps before; None if each pass is a step.
        kernels: see `cowclip_sharders`.
    """

    def __init__(self, backwards_per_step: int | None = 1, kernels: Kernels = "auto") -> None:
        if kernels not in get_args(Kernels):
            raise ValueError(f"kernels is {kernels!r}; write 'auto', 'torch' or 'triton'")
        self._per_step = backwards_per_step
        self._kernels: Kernels = kernels
        # By collection: passes of the current step, and updates since the last optimizer step.
        self._under_way: Counter[int] = Counter()
        self._since_step: Counter[int] = Counter()
        self._passes = 0  # Through any collection, since the last optimizer step.
        # Whether the program calls `fused_optimizer.step()`, which tells steps as well.
        self._is_stepped = False
        self._optimizers = ModelOptimizers()
        self._collections: dict[int, _Collection] = {}
        self._next = 0
        self._pass: int | None = None
        self._reached: Counter[tuple[int, int]] = Counter()
        self._queue: UpdateQueue | None = None
        # The hook is global; it must not keep the model alive.
        this = weakref.ref(self)

        def stepped(optimizer: Optimizer, *_: object) -> None:
            if (alive := this()) is not None:
                alive._after_step_of(optimizer)

        handle = register_optimizer_step_post_hook(stepped)
        weakref.finalize(self, handle.remove)

    def add_collection(
        self,
        module: nn.Module,
        tables: Sequence[CowClipTables],
        split_blocks: dict[Block, tuple[int, ...]],
        settings: dict[str, UpdateSettings],
        env: ShardingEnv,
        device: torch.device,
    ) -> int:
        """Register a collection, in the same order on every rank; return its number.

        Args:
            tables: this rank's.
            split_blocks: see `blocks_split_by_columns`.
            settings: by table, as named in sums and random numbers.

        Raises:
            ValueError: the sharders were given to two models.
        """
        for number in [n for n, c in self._collections.items() if c.module() is None]:
            del self._collections[number]
        known = {name for c in self._collections.values() for name in c.names}
        twice = sorted(known & set(settings))
        if twice:
            raise ValueError(
                f"table {twice[0].lstrip('.')!r} is sharded for the second time by the same "
                "sharders; call cowclip_sharders() once for each model"
            )
        groups = CollectionGroups(split_blocks, settings, env, device)
        number = self._next
        self._next += 1
        unable = why_not_queued(tables, self._kernels)
        # Queued updates have collectives of their own, so all ranks must decide alike.
        is_queued = not groups.any(unable is not None)
        on_gpu = device.type == "cuda" or (tables and triton.handles(tables[0].row_counts))
        if unable is not None and on_gpu and self._kernels != "torch":
            _LOG.warning("plain PyTorch updates tables and waits for the GPU each time: %s", unable)
        if is_queued and self._queue is None:
            self._queue = UpdateQueue(device, groups.everyone)
        self._collections[number] = _Collection(
            weakref.ref(module),
            [weakref.ref(tbe) for tbe in tables],
            frozenset(settings),
            groups,
            is_queued,
        )
        return number

    def queue_of(self, number: int) -> NonFiniteFlag | None:
        """The flag that blocks a collection's updates; None if they are not queued on a GPU."""
        return self.flag if self._collections[number].is_queued else None

    @property
    def flag(self) -> NonFiniteFlag | None:
        """Blocks updates queued on a GPU; set it when a loss is not finite."""
        return None if self._queue is None else self._queue.flag

    def check_queued(self, *, up_to_now: bool = False) -> None:
        """Raise the error of a step queued on a GPU, on every rank alike.

        Args:
            up_to_now: wait for all queued steps; otherwise leave the newest few for later.

        Raises:
            NonFiniteGradientError: a step was not finite; the tables are as before it.
        """
        if self._queue is not None:
            self._queue.check(up_to_now=up_to_now)

    def reach(self, number: int, module: int = 0) -> None:
        """Note, during backward, that a pass goes through lookup `module` of a collection.

        Ranks without tables pass through it too, so every rank takes part in the update.
        """
        if not self._collections[number].names:
            # All its tables are frozen.
            return
        current = torch._C._current_graph_task_id()
        if current != self._pass:
            self._find_optimizers()
            self._passes += 1
            self._pass, self._reached = current, Counter()
            # Drop what an interrupted pass left behind.
            for collection in self._collections.values():
                for tbe in collection.tables:
                    tbe.gradients.clear()
            Variable._execution_engine.queue_callback(self._finish)
        self._reached[number, module] += 1

    def _finish(self) -> None:
        self._pass = None
        reached = sorted({number for number, _ in self._reached})
        for number in reached:
            for tbe in self._collections[number].tables:
                for lookup in tbe.gradients:
                    lookup.wait()
        completed = reached
        if self._per_step is not None:
            limits = self._is_stepped or self._optimizers.found
            if limits and any(self._since_step[n] for n in reached):
                raise ValueError(
                    "a backward pass asks for a second update of the tables without an optimizer "
                    "step in between. For gradient accumulation write "
                    "cowclip_sharders(backwards_per_step=N): gradients and counts of N backward "
                    "passes add up. With backwards_per_step=None every pass is an update. If the "
                    "program leaves out the optimizer's step, as after a large gradient, call "
                    "model.fused_optimizer.step() there: the tables have taken theirs. "
                    "Semi-synchronous pipelines are not supported, as they look up outdated rows"
                )
            self._under_way.update(reached)
            completed = [n for n in reached if self._under_way[n] >= self._per_step]
        for number in reached:
            if number in completed:
                self._under_way.pop(number, None)
                continue
            # Keep this pass's gradients until a later pass completes the step.
            collection = self._collections[number]
            for tbe in collection.tables:
                gradients = map(tbe.row_gradients, tbe.take_gradients())
                collection.held.setdefault(tbe, []).extend(gradients)
        # All ranks decide alike: those without tables pass through the modules too.
        is_one_pass = self._per_step in (1, None) and all(
            times == 1 for times in self._reached.values()
        )
        self._step(completed, is_one_pass)

    def after_step(self) -> None:
        """The tables' own optimizer (`fused_optimizer`) has stepped: the step under way is over."""
        if not self._passes:
            return
        check_scale(scale_of_the_loss())
        if self._per_step is not None:
            self._is_stepped = True
            self._end_step()

    def _after_step_of(self, optimizer: Optimizer) -> None:
        # TorchRec's optimizers call others, which tell their own steps.
        if not self._passes or isinstance(optimizer, KeyedOptimizer):
            return
        in_time = self._passes >= (self._per_step or 1)
        known = self._optimizers.after_step(optimizer, in_time)
        if self._per_step is None:
            return
        if known.is_models and known.in_time:
            self._end_step()
        elif known.is_models:
            self._since_step.clear()

    def _find_optimizers(self) -> None:
        """Within a backward pass, see which optimizers are the model's that stepped before it."""
        for known in self._optimizers.find():
            self._since_step.clear()
            self._passes = 0 if known.in_time else self._passes
            if self._under_way:
                _LOG.warning(
                    "an optimizer of this model stepped before all %d announced backward passes, "
                    "and the tables wait for the others%s. If accumulation ended there, step "
                    "model.fused_optimizer too, as CombinedOptimizer([model.fused_optimizer, ...]) "
                    "does",
                    self._per_step,
                    " this once" if known.in_time else ", as it may do so in each pass",
                )

    def _end_step(self) -> None:
        """End the step of the tables with the passes so far."""
        cut_short = [n for n in sorted(self._under_way) if n in self._collections]
        self._under_way.clear()
        self._step(cut_short, is_one_pass=False)
        self._since_step.clear()
        self._passes = 0

    def _step(self, numbers: list[int], is_one_pass: bool) -> None:
        present = [self._collections[number] for number in numbers]
        if not present:
            return
        queue = self._queue if is_one_pass and all(c.is_queued for c in present) else None
        if self._queue is not None and queue is None:
            self._queue.settle()
        pending = [each for c in present for each in c.pending_updates(queue is not None)]
        reductions: list[Reduction] = [c.groups for c in present if c.groups.is_needed]
        if queue is not None:
            reductions = [queue]
        row_counts = update_([update for _, update in pending], reductions)
        for (tbe, _), counts in zip(pending, row_counts, strict=True):
            tbe.row_counts += counts
        tables = [tbe for collection in present for tbe in collection.tables]
        for tbe in tables:
            tbe.step_count += 1
        if queue is not None:
            queue.end_step(tables)
        self._since_step.update(numbers)
        # The next lookup may run on another stream.
        on_gpu = any(tbe.row_counts.is_cuda for tbe in tables)
        updated = torch.cuda.current_stream().record_event() if on_gpu else None
        for tbe in tables:
            tbe.version += 1
            tbe.updated = updated


class UpdateQueue:
    """The `Reduction` of updates queued on a GPU, whose host does not wait to learn of a refusal.

    A value that is not finite sets the flag, which `refuses` shares among the ranks. The kernels
    write nothing while it is set. The host reads it some steps later.
    """

    def __init__(self, device: torch.device, everyone: dist.ProcessGroup | None) -> None:
        self.flag = NonFiniteFlag(device)
        self._everyone = everyone
        self._updates = 0
        # For each unchecked update: its tables, and the step each was at.
        self._unchecked: dict[int, list[tuple[CowClipTables, int]]] = {}

    def sum_columns_(self, each: Sequence[object]) -> None:
        """See `Reduction`; whole rows are on one rank."""

    def refuses(self, found: bool) -> bool:
        """See `Reduction`; the kernels refuse."""
        self._share_flag()
        return found

    def end_step(self, tables: Sequence[CowClipTables]) -> None:
        """Note that a step of tables is queued; raise the error of an earlier one."""
        self._updates += 1
        self._unchecked[self._updates] = [(tbe, int(tbe.step_count) - 1) for tbe in tables]
        self.flag.end_step(self._updates)
        self.check()

    def settle(self) -> None:
        """Wait for the queued steps and raise their errors, before an unqueued update."""
        self.check(up_to_now=True)
        self._share_flag()
        if self.flag.tensor.item():
            self.flag.tensor.zero_()
            raise NonFiniteGradientError("the loss is not finite; no table was changed")

    def _share_flag(self) -> None:
        """Set the flag on all ranks if it is set on one."""
        if self._everyone is not None:
            dist.all_reduce(self.flag.tensor, op=dist.ReduceOp.MAX, group=self._everyone)

    def check(self, *, up_to_now: bool = False) -> None:
        """See `BackwardUpdate.check_queued`."""
        bad = self.flag.bad_step(up_to_now=up_to_now)
        unread = self.flag.unread
        if bad is None:
            for number in [n for n in self._unchecked if n not in unread]:
                del self._unchecked[number]
            return
        undone = [self._unchecked[number] for number in sorted(self._unchecked) if number >= bad]
        self._unchecked = {}
        for before in reversed(undone):
            for tbe, step in before:
                tbe.rewind(step)
        ago = self._updates - bad
        # A rank without tables knows only how many steps ago.
        when = f"in step {undone[0][0][1] + 1}" if undone[0] else f"{ago} steps ago"
        raise NonFiniteGradientError(
            f"the loss, or the gradient of an embedding row, was not finite {when}; the tables are "
            "as before that step, and the steps queued after it were not taken",
            ago,
        )


def why_not_queued(tables: Sequence[CowClipTables], kernels: Kernels = "auto") -> str | None:
    """Why the updates of a collection cannot be queued on this rank; None if they can."""
    if kernels == "torch":
        return "kernels is 'torch'"
    for tbe in tables:
        if not triton.handles(tbe.row_counts):
            reason = "Triton has no GPU here, or is not installed"
        elif tbe.is_replicated:
            reason = "they are replicated (data_parallel)"
        elif len(tbe.arrays) != 1:
            reason = "shards of several widths or first columns are looked up together"
        else:
            from stampede.optim.backends.triton import why_not
            from stampede.optim.triton.check import why_not_trusted

            (array,), pooling = tbe.arrays, tbe.pooling_mode
            reason = why_not(array)
            if reason is None and kernels == "auto":
                reason = why_not_trusted(
                    array,
                    pooled=pooling != PoolingMode.NONE,
                    mean=pooling == PoolingMode.MEAN,
                )
        if reason is not None:
            names = ", ".join(sorted({shard.table for a in tbe.arrays for shard in a.shards}))
            return f"tables {names:.200}: {reason}"
    return None
