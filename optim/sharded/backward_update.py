"""One update of all tables at the end of each backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torchrec.distributed.types import ShardingEnv

from stampede.optim.helen import HelenSettings
from stampede.optim.reduction import PendingUpdate, TableSums
from stampede.optim.rows import RowGradients, merge_rows
from stampede.optim.settings import UpdateSettings
from stampede.optim.sharded.helen import HelenPasses
from stampede.optim.sharded.layout import CollectionLayout, ProcessGroups
from stampede.optim.sharded.misuse import MisuseGuard
from stampede.optim.sharded.reduction import CollectionGroups
from stampede.optim.update import update_

if TYPE_CHECKING:
    from stampede.optim.sharded.tables import CowClipTables


@dataclass
class _Collection:
    groups: CollectionGroups
    tables: list[CowClipTables]
    world_size: int
    clips_everything: bool


class BackwardUpdate:
    """Collects the rows' gradients of a backward pass and updates the tables when it is over.

    What a row's step needs may lie in other tables and on other ranks. So the tables hand in the
    compact sums of their rows, and the update runs once for all of them before `backward` returns.
    All collectives run here, in an order that is fixed when the model is sharded.

    One object serves all collections that one call of `cowclip_sharders` shards.
    """

    def __init__(self, guard: MisuseGuard) -> None:
        self.guard = guard
        self._groups = ProcessGroups()
        self._helen: HelenPasses | None = None
        self._collections: list[_Collection] = []
        self._pass: int | None = None
        self._delivered: dict[CowClipTables, list[list[RowGradients]]] = {}
        self._events: list[torch.cuda.Event] = []
        self._everything: dist.ProcessGroup | None = None

    def add_collection(
        self,
        layout: CollectionLayout,
        settings: dict[str, UpdateSettings],
        helen: dict[str, HelenSettings],
        tables: list[CowClipTables],
        env: ShardingEnv,
    ) -> None:
        """Take in a collection; every rank must do so in the same order.

        Args:
            layout: its plan.
            settings: of its tables, by the names of the layout.
            helen: of those tables among them whose optimizer is Helen.
            tables: those of this rank.
            env: the processes.
        """
        if not settings:
            return
        self._check_passes(helen, settings)
        groups = CollectionGroups(layout, settings, self._groups, env.rank)
        clips_everything = any(s.clip.granularity == "global" for s in settings.values())
        self._collections.append(_Collection(groups, tables, env.world_size, clips_everything))
        for tbe in tables:
            tbe.owner = self
        holders = {
            rank
            for collection in self._collections
            if collection.clips_everything
            for rank in collection.groups.layout.all_holders
        }
        self._everything = self._groups.of(tuple(sorted(holders)))

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
            self.guard.passes = 2

    def deliver(self, tbe: CowClipTables, rows: list[RowGradients]) -> None:
        """Hand in the sums of one lookup's rows, from within backward."""
        current = torch._C._current_graph_task_id()
        if current != self._pass:
            # What an interrupted pass left behind is not part of this one.
            self._pass, self._delivered, self._events = current, {}, []
            Variable._execution_engine.queue_callback(self._finish)
        self._delivered.setdefault(tbe, []).append(rows)
        if rows[0].grads.is_cuda:
            # The update may run on another stream than this lookup's backward.
            self._events.append(torch.cuda.current_stream().record_event())

    def _finish(self) -> None:
        delivered, self._delivered, self._pass = self._delivered, {}, None
        self._wait_for_lookups(delivered)
        self.guard.before_update()
        present = [
            (collection, [tbe for tbe in collection.tables if tbe in delivered])
            for collection in self._collections
        ]
        present = [(collection, tables) for collection, tables in present if tables]
        self._check_everything_is_there(present)
        pending = self._pending(present, delivered)
        groups = [collection.groups for collection, _ in present]
        if self._helen is None:
            self._update(pending, groups, present)
        elif self._helen.first is None:
            self._helen.first_pass(pending, groups)
        else:
            self._update(self._helen.second_pass(pending), groups, present)
        self.guard.after_update()
        # The next lookup may run on yet another stream.
        updated = torch.cuda.current_stream().record_event() if self._events else None
        for tbe in delivered:
            tbe.version += 1
            tbe.updated = updated

    def _wait_for_lookups(self, delivered: dict[CowClipTables, list[list[RowGradients]]]) -> None:
        if not self._events:
            return
        here = torch.cuda.current_stream()
        for event in self._events:
            here.wait_event(event)
        for lookups in delivered.values():
            for rows in chain.from_iterable(lookups):
                for part in rows:
                    part.record_stream(here)

    def _pending(
        self,
        present: Sequence[tuple[_Collection, list[CowClipTables]]],
        delivered: dict[CowClipTables, list[list[RowGradients]]],
    ) -> list[tuple[CowClipTables, PendingUpdate]]:
        """What is to be updated: several lookups added up, replicated tables exchanged."""
        pending = []
        for collection, tables in present:
            for tbe in tables:
                lookups = zip(*delivered[tbe], strict=True)
                for array, rows in zip(tbe.arrays, lookups, strict=True):
                    batch = merge_rows(rows)
                    if tbe.is_replicated:
                        batch = collection.groups.exchange(batch, collection.world_size)
                    step = int(tbe.step_count) + 1
                    lr = tbe.get_learning_rate()
                    pending.append((tbe, PendingUpdate(array, batch, lr, step)))
        return pending

    def _update(
        self,
        pending: Sequence[tuple[CowClipTables, PendingUpdate]],
        groups: Sequence[CollectionGroups],
        present: Sequence[tuple[_Collection, list[CowClipTables]]],
    ) -> None:
        reduction = _Reduction(groups, self._everything, present)
        outcomes = update_([update for _, update in pending], reduction)
        for (tbe, _), outcome in zip(pending, outcomes, strict=True):
            tbe.row_counts += torch.stack([outcome.touched, outcome.clipped, outcome.skipped])
        for tbe in {id(tbe): tbe for tbe, _ in pending}.values():
            tbe.step_count += 1

    def _check_everything_is_there(
        self, present: Sequence[tuple[_Collection, list[CowClipTables]]]
    ) -> None:
        here = [collection for collection, _ in present]
        if not any(collection.clips_everything for collection in here):
            return
        for collection in self._collections:
            missing = collection.clips_everything and collection not in here
            if missing and collection.tables:
                raise ValueError(
                    "CowClip(granularity='global') holds the gradients of all tables together, "
                    "but a backward pass reached only some of the collections; use another "
                    "granularity, or make one loss of all of them"
                )


class _Reduction:
    """Sums of all collections of one backward pass, one after the other."""

    def __init__(
        self,
        groups: Sequence[CollectionGroups],
        everything: dist.ProcessGroup | None,
        present: Sequence[tuple[_Collection, list[CowClipTables]]],
    ) -> None:
        self._groups = groups
        self._everything = everything if any(c.clips_everything for c, _ in present) else None

    def sum_columns_(
        self, updates: Sequence[PendingUpdate], values: Sequence[Tensor], *, all_rows: bool
    ) -> None:
        """See `Reduction.sum_columns_`."""
        for groups in self._groups:
            groups.sum_columns_(updates, values, all_rows=all_rows)

    def sum_tables_(self, sums: TableSums) -> None:
        """See `Reduction.sum_tables_`."""
        for groups in self._groups:
            groups.sum_tables_(sums)
        if self._everything is not None:
            if sums.everything is None:
                sums.everything = sums.nonfinite.new_zeros(2)
            dist.all_reduce(sums.everything, group=self._everything)
