"""One update of all tables at the end of each backward pass."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torchrec.distributed.types import ShardingEnv

from stampede.optim.helen import HelenSettings
from stampede.optim.nonfinite import NonFiniteFlag
from stampede.optim.reduction import PendingUpdate
from stampede.optim.rows import RowGradients, merge_rows
from stampede.optim.settings import UpdateSettings
from stampede.optim.sharded.helen import HelenPasses
from stampede.optim.sharded.layout import CollectionLayout, ProcessGroups
from stampede.optim.sharded.lookups import LookupGradient
from stampede.optim.sharded.passes import Passes
from stampede.optim.sharded.queue import UpdateQueue, can_be_queued_everywhere, why_not_queued
from stampede.optim.sharded.reduction import BackwardReduction, CollectionGroups
from stampede.optim.update import update_

if TYPE_CHECKING:
    from stampede.optim.sharded.collections import CowClipCollection
    from stampede.optim.sharded.tables import CowClipTables

_LOG = logging.getLogger("stampede.optim")


@dataclass
class _Collection:
    """A sharded collection; it is not kept alive.

    Attributes:
        module: the collection.
        names: of its tables, in sums.
        groups: its collectives.
        clips_everything: whether some of its tables are clipped together with all others.
        is_queued: whether its updates are queued on a GPU, on all ranks.
        held: what earlier passes of the step under way handed in, by row, for each array.
    """

    module: weakref.ref[CowClipCollection]
    names: frozenset[str]
    groups: CollectionGroups
    clips_everything: bool
    is_queued: bool
    held: dict[CowClipTables, list[list[RowGradients]]] = field(default_factory=dict)

    def hold(self, delivered: dict[CowClipTables, list[LookupGradient]]) -> None:
        """Keep what a pass has handed in for the step that a later one completes."""
        for tbe in self.tables:
            for lookup in delivered.get(tbe, ()):
                self.held.setdefault(tbe, []).append(tbe.row_gradients(lookup))

    @property
    def tables(self) -> list[CowClipTables]:
        """Those of this rank; none once the collection is gone."""
        module = self.module()
        return [] if module is None else module.cowclip_tables()


class BackwardUpdate:
    """Collects the rows' gradients of a backward pass and updates the tables when it is over.

    What a row's step needs may lie in other tables and on other ranks. So the tables hand in the
    compact sums of their rows, and the update runs once for all of them before `backward` returns.
    All collectives run here, in an order that is fixed when the model is sharded.

    One object serves all collections that one call of `cowclip_sharders` shards.
    """

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        passes.complete = self._complete
        self._groups = ProcessGroups()
        self._helen: HelenPasses | None = None
        self._collections: dict[int, _Collection] = {}
        self._next = 0
        self._pass: int | None = None
        self._reached: Counter[tuple[int, int]] = Counter()
        self._delivered: dict[CowClipTables, list[LookupGradient]] = {}
        self._events: list[torch.cuda.Event] = []
        self._everything: dist.ProcessGroup | None = None
        self._queue: UpdateQueue | None = None

    def add_collection(
        self,
        module: CowClipCollection,
        layout: CollectionLayout,
        settings: dict[str, UpdateSettings],
        helen: dict[str, HelenSettings],
        env: ShardingEnv,
        device: torch.device,
    ) -> int:
        """Take in a collection; every rank must do so in the same order.

        Args:
            module: the collection.
            layout: its plan.
            settings: of its tables, by the names of the layout.
            helen: of those tables among them whose optimizer is Helen.
            env: the processes.
            device: of the tables.

        Returns:
            A number for it, the same on every rank.

        Raises:
            ValueError: the sharders were given to two models, or optimizers cannot be mixed.
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
        self._check_passes(helen, settings)
        groups = CollectionGroups(layout, settings, self._groups, env, device)
        clips_everything = any(s.clip.granularity == "global" for s in settings.values())
        number = self._next
        self._next += 1
        self._everything = self._groups.of(tuple(range(env.world_size)))
        unable = why_not_queued(module.cowclip_tables(), bool(helen))
        is_queued = can_be_queued_everywhere(unable is None, device, self._everything)
        if unable is not None and device.type == "cuda":
            _LOG.warning("on a GPU every update waits for the device: %s", unable)
        if is_queued and self._queue is None:
            self._queue = UpdateQueue(device, self._everything)
        self._collections[number] = _Collection(
            weakref.ref(module), frozenset(settings), groups, clips_everything, is_queued
        )
        return number

    def queue_of(self, number: int) -> NonFiniteFlag | None:
        """The flag that forbids the updates of a collection, if they are queued on a GPU."""
        return self._queue.flag if self._collections[number].is_queued else None

    @property
    def flag(self) -> NonFiniteFlag | None:
        """What forbids updates that are queued on a GPU; None where none are.

        A training loop that marks it when the loss is not finite need not wait for the loss.
        """
        return None if self._queue is None else self._queue.flag

    def check_queued(self, *, up_to_now: bool = False) -> None:
        """Raise what was found in the steps that were queued on a GPU.

        Every rank must call it with the same argument at the same point.

        Args:
            up_to_now: wait for all of them; otherwise the newest few are left for later.

        Raises:
            NonFiniteGradientError: a step was not finite. The tables, and the numbers of their
                steps, are as before it.
        """
        if self._queue is not None:
            self._queue.check(up_to_now=up_to_now)

    def _check_passes(
        self, helen: dict[str, HelenSettings], settings: dict[str, UpdateSettings]
    ) -> None:
        """Helen takes two backward passes a step, all others one: they cannot be mixed."""
        is_first = not self._collections
        if bool(helen) != (len(helen) == len(settings)) or (
            not is_first and bool(helen) != (self._helen is not None)
        ):
            raise ValueError(
                "Helen takes two backward passes a step and the optimizers with CowClip one; give "
                "all tables the one or the other"
            )
        if helen:
            self._helen = self._helen or HelenPasses()
            self._helen.settings.update(helen)
            if self.passes.per_step not in (1, None):
                raise ValueError(
                    "Helen takes two backward passes of one batch a step, whose gradients do not "
                    "add up; leave backwards_per_step of cowclip_sharders() out"
                )
            self.passes.updates = 2

    def reach(self, number: int, module: int = 0) -> None:
        """Note, from within backward, that a pass goes through a lookup of a collection.

        Every rank passes through it, also one without tables; so all take part in the update.

        Args:
            number: of the collection.
            module: which of its lookup modules.
        """
        current = torch._C._current_graph_task_id()
        if current != self._pass:
            # What an interrupted pass left behind is not part of this one.
            self._pass, self._reached, self._delivered, self._events = current, Counter(), {}, []
            Variable._execution_engine.queue_callback(self._finish)
        self._reached[number, module] += 1

    def deliver(self, tbe: CowClipTables, lookup: LookupGradient) -> None:
        """Hand in the gradient of a lookup's output, from within backward, after `reach`."""
        self._delivered.setdefault(tbe, []).append(lookup)
        if lookup.grad.is_cuda:
            # The update may run on another stream than this lookup's backward.
            self._events.append(torch.cuda.current_stream().record_event())

    def _finish(self) -> None:
        delivered, self._delivered, self._pass = self._delivered, {}, None
        reached = sorted({number for number, _ in self._reached})
        self._wait_for_lookups(delivered)
        completed = self.passes.completed(reached)
        for number in set(reached) - set(completed):
            self._collections[number].hold(delivered)
        # Every rank decides alike, also one without tables: it passes through the modules, too.
        is_one_pass = self.passes.per_step in (1, None) and all(
            times == 1 for times in self._reached.values()
        )
        self._step(completed, delivered, is_one_pass)

    def _complete(self, numbers: list[int]) -> None:
        """Step the tables of collections with what earlier passes have handed in."""
        self._step([n for n in numbers if n in self._collections], {}, is_one_pass=False)

    def _step(
        self,
        numbers: list[int],
        delivered: dict[CowClipTables, list[LookupGradient]],
        is_one_pass: bool,
    ) -> None:
        """A step of the tables of some collections."""
        present = [self._collections[number] for number in numbers]
        if not present:
            return
        self._check_everything_is_there(present)
        if is_one_pass and all(collection.is_queued for collection in present):
            tables = [tbe for collection in present for tbe in collection.tables]
            self._queue.update(tables, {tbe: one for tbe, (one,) in delivered.items()})
        else:
            tables = self._update_now(present, delivered)
        self.passes.updated(numbers)
        # The next lookup may run on yet another stream.
        on_gpu = any(tbe.row_counts.is_cuda for tbe in tables)
        updated = torch.cuda.current_stream().record_event() if on_gpu else None
        for tbe in tables:
            tbe.version += 1
            tbe.updated = updated

    def _update_now(
        self,
        present: Sequence[_Collection],
        delivered: dict[CowClipTables, list[LookupGradient]],
    ) -> set[CowClipTables]:
        """Update the tables of some collections; returns them."""
        if self._queue is not None:
            self._queue.settle()
        pending = self._pending(present, delivered)
        groups = [collection.groups for collection in present]
        if self._helen is None:
            self._update(pending, present)
        elif self._helen.first is None:
            self._helen.first_pass(pending, groups)
        else:
            self._update(self._helen.second_pass(pending, groups), present)
        return {tbe for tbe, _ in pending}

    def _wait_for_lookups(self, delivered: dict[CowClipTables, list[LookupGradient]]) -> None:
        if not self._events:
            return
        here = torch.cuda.current_stream()
        for event in self._events:
            here.wait_event(event)
        for gradient in chain.from_iterable(delivered.values()):
            gradient.record_stream(here)

    def _pending(
        self,
        present: Sequence[_Collection],
        delivered: dict[CowClipTables, list[LookupGradient]],
    ) -> list[tuple[CowClipTables, PendingUpdate]]:
        """What is to be updated: several lookups added up, replicated tables exchanged.

        Tables of the collection that the loss does not depend on have a gradient of zero, whatever
        the plan.
        """
        pending = []
        for collection in present:
            for tbe in collection.tables:
                sums = collection.held.pop(tbe, [])
                sums += [tbe.row_gradients(lookup) for lookup in delivered.get(tbe, ())]
                lookups = zip(*(sums or [tbe.no_gradients()]), strict=True)
                for array, rows in zip(tbe.arrays, lookups, strict=True):
                    batch = merge_rows(rows)
                    if tbe.is_replicated:
                        batch = collection.groups.exchange(batch)
                        if array.missed is not None:
                            # Rows that only other ranks looked up.
                            array.missed.catch_up_rows(array, batch.rows)
                    step = int(tbe.step_count) + 1
                    lr = tbe.get_learning_rate()
                    pending.append((tbe, PendingUpdate(array, batch, lr, step)))
        return pending

    def _update(
        self,
        pending: Sequence[tuple[CowClipTables, PendingUpdate]],
        present: Sequence[_Collection],
    ) -> None:
        together = any(collection.clips_everything for collection in present)
        reduction = BackwardReduction(
            [collection.groups for collection in present], self._everything if together else None
        )
        outcomes = update_([update for _, update in pending], reduction)
        for (tbe, _), outcome in zip(pending, outcomes, strict=True):
            tbe.row_counts += torch.stack([outcome.touched, outcome.clipped, outcome.skipped])
        for tbe in {tbe for tbe, _ in pending}:
            tbe.step_count += 1

    def _check_everything_is_there(self, present: Sequence[_Collection]) -> None:
        if not any(collection.clips_everything for collection in present):
            return
        for collection in self._collections.values():
            alive = collection.module() is not None
            if collection.clips_everything and alive and collection not in present:
                raise ValueError(
                    "CowClip(granularity='global') holds the gradients of all tables together, "
                    "but a backward pass reached only some of the collections; use another "
                    "granularity, or make one loss of all of them"
                )
