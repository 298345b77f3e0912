"""Start a new run from the weights of another, or from all of its state.

Rows of tables are matched by their ids, layers by name and shape.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from stampede import stores
from stampede.data.learning.row_meanings import (
    OtherMeaningError,
    RowMeanings,
    keys_of_rows,
    matched_rows,
)
from stampede.engine.checkpoint.manifest import (
    DTYPES,
    TABLES,
    read_manifest,
    weights_name,
)
from stampede.engine.checkpoint.retention import being_read, choose_checkpoint, verify
from stampede.engine.checkpoint.tensors import copy_rows_, local_parts, read_tensors
from stampede.engine.config import Config
from stampede.engine.config.data import SyntheticSection
from stampede.engine.config.presets import flat_keys
from stampede.engine.errors import RunFolderError
from stampede.engine.inference.kept import check_trained_with, kept_inputs, meanings_of_rows
from stampede.engine.job import Job
from stampede.engine.job.optimizers import table_inits
from stampede.engine.processes import Processes, together
from stampede.engine.reading import data_folder
from stampede.models import table_name
from stampede.optim import drawn_by_id

_REMEDY = "copy it again from the original run, or start without its weights"

_ABSENT, _UNUSED = "not in the checkpoint", "not in this run"
_NEW_RUN = "a new run's optimizers start from scratch"

# Prefixes of the names of tensors.
_MODEL, _OF_TABLES, _OF_LAYERS = "model.", "fused.", "dense."
_OPTIMIZERS = (_OF_TABLES, _OF_LAYERS)
_NUMBER_WEIGHTS = "model.number_weights.weight"


@dataclass(frozen=True)
class Source:
    """A verified checkpoint with its vocabularies.

    Attributes:
        inputs: prepared folder without rows; None for synthetic clicks, whose ids are row numbers.
        held: on rank 0, keeps the checkpoint's run from deleting it, see `being_read`.
    """

    checkpoint: Path
    inputs: Path | None
    held: BinaryIO | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state for other ranks, which do not hold the checkpoint."""
        return {**vars(self), "held": None}


def open_source(init_from: str, run: Path) -> Source:
    """Open and verify what `checkpoint.init_from` names, without executing any of its code.

    That is a checkpoint, or a run folder, which stands for its best epoch's checkpoint, or its
    newest before the first evaluation.

    Raises:
        RunFolderError, DataError: it is missing or damaged, or its vocabularies are missing.
    """
    path = stores.fetched(init_from).absolute()
    if not os.path.isdir(path):
        raise RunFolderError(
            f"checkpoint.init_from: {init_from}: no such run folder or checkpoint; write a run "
            "folder such as runs/quickstart"
        )
    if run.absolute().resolve() in (path.resolve(), *path.resolve().parents):
        raise RunFolderError(
            f"checkpoint.init_from: {init_from} is in {run}, where this run starts from scratch; "
            "write another run.name, or checkpoint.resume=auto to continue it"
        )
    checkpoint, held = being_read(lambda: choose_checkpoint(path, remedy=_REMEDY))
    verify(checkpoint, _REMEDY)
    manifest = read_manifest(checkpoint)
    if manifest.config.get("data", {}).get("kind") == "synthetic":
        return Source(checkpoint, None, held)
    kept = kept_inputs(checkpoint.parent.parent)
    if kept is None:
        raise RunFolderError(
            f"{checkpoint}: its vocabularies are missing: "
            f"{checkpoint.parent.parent / 'inputs'} does not exist; {_REMEDY}"
        )
    check_trained_with(kept, manifest.data, checkpoint, _REMEDY)
    return Source(checkpoint, kept, held)


def load_matching(
    source: Source, config: Config, sizes: Mapping[str, int], job: Job, processes: Processes
) -> LoadReport:
    """Load the weights that fit into a job, on any number of ranks and any sharding plan.

    Rank 0 matches the ids of one field at a time. A rank with a part of that table reads the whole
    tensor, so its peak memory is its own tables, twice that tensor, and the matched rows as int64.
    All ranks must call it; the report is the same on all.

    Raises:
        RunFolderError, DataError: the checkpoint or a vocabulary is damaged.
    """
    # Rows that wait take their steps, on all ranks at the same point.
    state = job.state(processes.rank)
    del state["random"]
    load = _Load(source, config, sizes, job, flat_keys(state))
    manifest, group = load.manifest, processes.group
    fields = []
    for name in job.front.tables:
        rows, saved, why = processes.on_main(lambda name=name: load.match(name))
        loaded = 0 if rows is None else int((rows >= 0).sum())
        new, dropped = sizes[name] - loaded, saved - loaded
        fields.append(FieldReport(name, sizes[name], loaded, new, dropped, why))
        together(lambda name=name, rows=rows: load.fill_table(name, rows), group)
    taken = {load.table_then(name) for name in job.front.tables}
    fields += [
        FieldReport(table.field, 0, 0, 0, table.rows, _UNUSED)
        for table in manifest.tables.values()
        if table.field not in taken
    ]
    layers, new = load.fitting_layers()
    together(lambda: load.fill_layers(layers), group)
    # Only some ranks hold the states of a table.
    new = {name: why for of_rank in together(lambda: new, group) for name, why in of_rank.items()}
    job.model.load_state_dict(state["model"])
    # Prefixes of what is told with the rows of tables, or is not worth telling.
    told = (f"{_MODEL}{TABLES}", "random.", *([_OF_TABLES] if load.takes_all else []))
    if load.takes_all:
        # FBGEMM's Adam keeps its step count outside of its state.
        job.model.fused_optimizer.set_optimizer_step(manifest.progress.updates)
    then, now, note = [*manifest.data.vocabulary_sizes], [*job.front.fields], ""
    if then != now and len(then) == len(now):
        note = (
            "the id fields changed or are in another order; layers that tell them apart by "
            f"position were trained on: {', '.join(then)}"
        )
    return LoadReport(
        checkpoint=str(source.checkpoint),
        step=manifest.progress.step,
        fields=fields,
        loaded=sorted(layers),
        new={name: why for name, why in sorted(new.items()) if not name.startswith(told)},
        dropped=[
            name
            for name in sorted(manifest.tensors.keys() - layers.keys())
            if not name.startswith(told)
        ],
        note=note,
    )


@torch.no_grad()
def draw_rows_of_new_ids(
    config: Config, rows: Mapping[str, np.ndarray], job: Job, processes: Processes
) -> None:
    """Draw the rows of new ids by id, so that neither the time nor the row number matters.

    All ranks must call it. `rows` has the rows of new ids, by field.
    """
    if not rows:
        return
    state = job.model.state_dict()

    def keys() -> dict[str, np.ndarray]:
        meanings = meanings_of_rows(data_folder(config), {})
        of_tables = ((table, rows[table]) for table in job.front.tables if table in rows)
        return {table: keys_of_rows(meanings[table], places) for table, places in of_tables}

    inits = table_inits(config, job.front)
    for field, found in processes.on_main(keys).items():
        table, places = state.get(weights_name(field, state)), rows[field]
        if table is None or not len(places):
            continue
        dim = table.size()[1]
        name = table_name(field)
        drawn = torch.from_numpy(drawn_by_id(found, inits[name], table=name, dim=dim))
        order = torch.full((table.size()[0],), -1, dtype=torch.int64)
        order[torch.from_numpy(places)] = torch.arange(len(places))
        copy_rows_(table, drawn, order)
    job.model.load_state_dict(state)


class _Load:
    """Matches a checkpoint's rows with a run's, and fills the tensors that this rank holds."""

    def __init__(
        self,
        source: Source,
        config: Config,
        sizes: Mapping[str, int],
        job: Job,
        targets: Mapping[str, Any],
    ) -> None:
        self.manifest = read_manifest(source.checkpoint)
        self.takes_all = config.checkpoint.init_state == "all"
        self._source, self._config, self._sizes, self._targets = source, config, sizes, targets
        then, now = self.manifest.data.goals, job.ctr_model.goals
        if then and now and then != now:
            raise RunFolderError(
                f"checkpoint.init_from: {source.checkpoint} was trained for the goals "
                f"{', '.join(then)}, found {', '.join(now)}; write the goals of the schema with "
                "these names, in this order"
            )
        # Stored first-order weights are multiplied by it, so that scores stay the same.
        self._ratio = self.manifest.first_order_scale / job.ctr_model.first_order_scale
        self._front = job.front

    def table_then(self, field: str) -> str:
        """The field whose table a field used in the checkpoint."""
        return self.manifest.data.shared.get(field, field)

    def match(self, field: str) -> tuple[np.ndarray | None, int, str]:
        """Match a field's table; on rank 0, which reads the vocabularies.

        Returns:
            The row of the checkpoint's table for each row, `[rows now]` int64, -1 if there is none,
            or None if no row fits; the rows of the checkpoint's table; and why no row fits.
        """
        table = self.manifest.tables.get(table_name(self.table_then(field)))
        if table is None:
            return None, 0, _ABSENT
        now = {n: [*ends] for n, ends in self._front.columns_of(field).names.items()}
        if table.columns != now:
            dims = (columns["embedding"][1] for columns in (table.columns, now))
            return None, table.rows, "dim was {}, now {}".format(*dims)
        try:
            return matched_rows(*(rows[field] for rows in self._meanings)), table.rows, ""
        except OtherMeaningError as reason:
            return None, table.rows, str(reason)

    @cached_property
    def _meanings(self) -> tuple[dict[str, RowMeanings], dict[str, RowMeanings]]:
        """What rows stood for in the checkpoint, and stand for now, by field."""
        is_synthetic = isinstance(self._config.data, SyntheticSection)
        folder = None if is_synthetic else data_folder(self._config)
        sizes = self.manifest.data.vocabulary_sizes
        then = meanings_of_rows(self._source.inputs, sizes, _REMEDY)
        return then, meanings_of_rows(folder, self._sizes)

    def fill_table(self, field: str, rows: np.ndarray | None) -> None:
        """Fill a field's table, with its optimizer's states if all is taken; rows as in `match`."""
        name = weights_name(field, self._targets, _MODEL)
        # A process may hold some tables only.
        parts = local_parts(self._targets[name]) if name in self._targets else ()
        if rows is None or not any(part.numel() for part, _ in parts):
            return
        then = weights_name(self.table_then(field), self.manifest.tensors, _MODEL)
        whole = self._read(then)
        whole[:, slice(*self._front.columns_of(field).names["first_order"])] *= self._ratio
        copy_rows_(self._targets[name], whole, torch.from_numpy(rows))
        begin, now = (f"{_OF_TABLES}{one.removeprefix(_MODEL)}." for one in (then, name))
        for state in self.manifest.tensors if self.takes_all else ():
            target = self._targets.get(state.replace(begin, now))
            if state.startswith(begin) and target is not None:
                whole = self._read(state)
                if whole.dim():
                    copy_rows_(target, whole, torch.from_numpy(rows))
                else:
                    target.copy_(whole)

    def fitting_layers(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The layers to fill from the checkpoint, with their moments if all is taken, by name; and
        the reason why each other tensor starts from scratch.
        """
        fitting, new = {}, {}
        for name, target in self._targets.items():
            if not name.startswith((_MODEL, _OF_LAYERS) if self.takes_all else _MODEL):
                new[name] = _NEW_RUN
            elif not name.startswith(f"{_MODEL}{TABLES}"):
                saved, now = self.manifest.tensors.get(name), list(target.size())
                if saved is not None and saved.size == now:
                    fitting[name] = target
                else:
                    new[name] = _ABSENT if saved is None else f"was {saved.size}, now {now}"
        return fitting, new

    def fill_layers(self, layers: dict[str, Tensor]) -> None:
        """Fill dense layers, by name."""
        if layers:
            self._fill(dict(layers))
        if _NUMBER_WEIGHTS in layers:
            layers[_NUMBER_WEIGHTS].detach().mul_(self._ratio)

    def _read(self, name: str) -> Tensor:
        saved = self.manifest.tensors[name]
        whole = torch.empty(saved.size, dtype=DTYPES[saved.dtype])
        self._fill({name: whole})
        return whole

    def _fill(self, tensors: dict[str, Tensor]) -> None:
        read_tensors(self._source.checkpoint, tensors, alone=True, manifest=self.manifest)


@dataclass(frozen=True)
class FieldReport:
    """What was loaded into a field's table.

    Attributes:
        rows: of the table; 0 if the run has no such field.
        loaded, new: rows with values of the checkpoint, and with initial values.
        dropped: rows of the checkpoint's table that are not used.
        why: the reason if none was loaded; else empty.
    """

    field: str
    rows: int
    loaded: int
    new: int
    dropped: int
    why: str


@dataclass(frozen=True)
class LoadReport:
    """What was loaded from a checkpoint.

    Attributes:
        fields: tables of the run, then those that only the checkpoint has.
        loaded: names of the other tensors that were loaded.
        new: the other tensors of the run that start from scratch, with the reason.
        dropped: names of the other tensors of the checkpoint that are not used.
        note: a warning on the layers; or empty.
    """

    checkpoint: str
    step: int
    fields: list[FieldReport]
    loaded: list[str]
    new: Mapping[str, str]
    dropped: list[str]
    note: str = ""

    def lines(self) -> list[str]:
        """The report in short; `init_from.json` of the run folder has all of it."""
        width = min(max([5, *(len(one.field) for one in self.fields)]), 32)

        def line(name: str, *numbers: object, why: str = "") -> str:
            row = f"  {name:<{width}}" + "".join(f"  {n:>13}" for n in numbers)
            return f"{row}  {why}" if why else row

        lines, total = [line("field", "rows", "loaded", "new", "not taken")], np.zeros(4, int)
        for one in self.fields:
            numbers = (one.rows, one.loaded, one.new, one.dropped)
            total += numbers
            lines.append(line(one.field, *(f"{n:,}" for n in numbers), why=one.why))
        lines.append(line("all", *(f"{n:,}" for n in total)))
        if not total[1]:
            lines.append(
                "  NO ROW of a table was loaded: no field matches in name, dim and kind of ids"
            )
        lines += [f"  {self.note}"] if self.note else []
        for what, kinds in (("dense layers", (_MODEL,)), ("optimizer state", _OPTIMIZERS)):
            loaded, new, dropped = (
                sum(name.startswith(kinds) for name in names)
                for names in (self.loaded, self.new, set(self.dropped) - self.new.keys())
            )
            counts = f"{loaded} tensors loaded, {new} new, {dropped} not taken"
            lines.append(f"  {what}: {counts} (init_from.json names them)")
        return lines
