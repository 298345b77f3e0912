"""A new run begins with the weights of another, or with all of its state.

Rows of tables are matched by their ids, layers by name and shape.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from stampede.data.learning.row_meanings import (
    OtherMeaningError,
    RowMeanings,
    keys_of_rows,
    matched_rows,
    row_meanings,
)
from stampede.data.prepared.manifest import FieldEntry
from stampede.engine.checkpoint import Manifest, flat_keys, read_manifest, read_tensors, verify
from stampede.engine.checkpoint.loading import TABLES
from stampede.engine.checkpoint.manifest import DTYPES, Progress, weights_key, weights_name
from stampede.engine.checkpoint.tensors import FailedSomewhereError, contents, together
from stampede.engine.config import Config
from stampede.engine.config.data import SyntheticSection
from stampede.engine.errors import RunFolderError
from stampede.engine.inference.kept import check_trained_with, kept_inputs, remedy
from stampede.engine.inference.trained import choose_checkpoint
from stampede.engine.job import Job
from stampede.engine.processes import PATIENCE, Processes
from stampede.engine.reading import data_folder
from stampede.models import StoredColumns, table_name
from stampede.optim import TableInit, drawn_by_id
from stampede.settings import cut

_REMEDY = "copy it again from where the run was made, or begin without its weights"

_ABSENT, _UNUSED = "not in the checkpoint", "not in this run"
_NEW_RUN = "a new run's optimizers begin anew"

# Names of tensors begin with these.
_MODEL, _OF_TABLES, _OF_LAYERS = "model.", "fused.", "dense."
_OPTIMIZERS = (_OF_TABLES, _OF_LAYERS)
_NUMBER_WEIGHTS = "model.number_weights.weight"

# Rows that are copied together.
_PIECE = 1 << 18

# Columns of a terminal; of more fields and tensors only the file has the names.
_WIDTH, _MOST_FIELDS, _MOST_TENSORS = 100, 60, 4


@dataclass(frozen=True)
class Source:
    """A checkpoint, whole and with the vocabularies that it was trained with.

    Attributes:
        checkpoint: its folder.
        inputs: a prepared folder without rows that says what its ids are; None for synthetic
            clicks, whose ids are rows of their tables.
    """

    checkpoint: Path
    inputs: Path | None


def open_source(init_from: str, run: Path) -> Source:
    """What `checkpoint.init_from` names, all checksums compared. Nothing of it is executed.

    Args:
        init_from: a checkpoint, or a run folder: then that of its best epoch, before the first
            evaluation the newest.
        run: folder of the run that is to begin.

    Raises:
        RunFolderError, DataError: there is none, it is damaged, or its vocabularies are not there.
    """
    path = Path(init_from).absolute()
    if not os.path.isdir(path):
        raise RunFolderError(
            f"checkpoint.init_from: {init_from}: there is no such run folder or checkpoint"
        )
    if run.absolute().resolve() in (path.resolve(), *path.resolve().parents):
        raise RunFolderError(
            f"checkpoint.init_from: {init_from} is in {run}, where this run begins anew; write "
            "another run.name, or checkpoint.resume=auto to continue it"
        )
    checkpoint = choose_checkpoint(path, remedy=_REMEDY)
    verify(checkpoint, _REMEDY)
    manifest = read_manifest(checkpoint)
    if manifest.config.get("data", {}).get("kind") == "synthetic":
        return Source(checkpoint, None)
    kept = kept_inputs(checkpoint.parent.parent)
    if kept is None:
        raise RunFolderError(
            f"{checkpoint}: what its ids are is not known: "
            f"{checkpoint.parent.parent / 'inputs'} is absent, where a run keeps its "
            f"vocabularies; {_REMEDY}"
        )
    check_trained_with(kept, manifest.data, checkpoint, _REMEDY)
    return Source(checkpoint, kept)


def load_matching(
    source: Source, config: Config, sizes: Mapping[str, int], job: Job, processes: Processes
) -> LoadReport:
    """Put the weights that fit into a job, on any number of ranks and under any sharding plan.

    Rank 0 looks up the ids of one field after the other. A rank reads the whole of a tensor if it
    has a part of that table: besides its own tables it holds one such tensor at a time, twice
    while it is read, and the matched rows as int64. All ranks must call it.

    Args:
        config: of the run, whose data are prepared.
        sizes: rows of each field's table, by field.

    Returns:
        What was loaded and what not; the same on all ranks.

    Raises:
        RunFolderError, DataError: the checkpoint or a vocabulary is damaged.
    """
    manifest = read_manifest(source.checkpoint)
    takes_all = config.checkpoint.init_state == "all"
    # All ranks at one point: rows that are behind take their steps.
    state = contents(job, processes.rank)
    del state["random"]
    targets = flat_keys(state)
    # What stored first-order weights are multiplied by, for scores to stay what they are.
    ratio = manifest.first_order_scale / job.ctr_model.first_order_scale
    first_order = slice(*job.front.columns.names["first_order"])
    matching = _Matching(source, manifest, config, sizes)
    group = processes.group(PATIENCE)

    def load_table(name: str, rows: np.ndarray | None) -> None:
        # A process may hold some tables only.
        if rows is None or name not in targets or not _has_rows_here(targets[name]):
            return
        whole = _read_whole(source.checkpoint, manifest, name)
        whole[:, first_order] *= ratio
        _copy_rows_(targets[name], whole, torch.from_numpy(rows))
        for moments in _states_of_table(manifest, targets, name) if takes_all else ():
            whole = _read_whole(source.checkpoint, manifest, moments)
            if whole.dim():
                _copy_rows_(targets[moments], whole, torch.from_numpy(rows))
            else:
                targets[moments].copy_(whole)

    def load_layers(layers: dict[str, Tensor]) -> None:
        if layers:
            read_tensors(source.checkpoint, dict(layers), alone=True)
        if _NUMBER_WEIGHTS in layers:
            layers[_NUMBER_WEIGHTS].detach().mul_(ratio)

    fields = []
    for name in job.front.fields:
        match = processes.on_main(lambda name=name: matching.match(name))
        loaded = 0 if match.rows is None else int((match.rows >= 0).sum())
        new, dropped = sizes[name] - loaded, match.saved_rows - loaded
        fields.append(FieldReport(name, sizes[name], loaded, new, dropped, match.why))
        _together(lambda name=name, match=match: load_table(weights_key(name), match.rows), group)
    layers, new = _fitting_layers(manifest, targets, takes_all)
    _together(lambda: load_layers(layers), group)
    # The states of tables are on some ranks only.
    new = {name: why for of_rank in _together(lambda: new, group) for name, why in of_rank.items()}
    job.model.load_state_dict(state["model"])
    fields += [
        FieldReport(table.field, 0, 0, 0, table.rows, _UNUSED)
        for table in manifest.tables.values()
        if table.field not in job.front.fields
    ]
    told_as_fields = {weights_key(one.field) for one in fields}
    if takes_all:
        # With the rows of their tables.
        told_as_fields |= {name for name in manifest.tensors if name.startswith(_OF_TABLES)}
        new = {name: why for name, why in new.items() if not name.startswith(_OF_TABLES)}
        _go_on_counting(job, manifest)
    dropped_tensors = {
        name: _NEW_RUN if name.startswith(_OPTIMIZERS) else new.get(name, _UNUSED)
        for name in sorted(manifest.tensors.keys() - layers.keys() - told_as_fields)
        if not name.startswith("random.")
    }
    return LoadReport(
        checkpoint=str(source.checkpoint),
        step=manifest.progress.step,
        fields=fields,
        loaded=sorted(layers),
        new=dict(sorted(new.items())),
        dropped=dropped_tensors,
        note=_note([*manifest.data.vocabulary_sizes], [*job.front.fields]),
    )


@torch.no_grad()
def draw_rows_of_new_ids(
    config: Config, rows: Mapping[str, np.ndarray], job: Job, processes: Processes
) -> None:
    """Draw the rows of new ids by id: the same values whenever an id comes and wherever its row is.

    All ranks must call it.

    Args:
        config: of the run, whose data are prepared.
        rows: of the tables, by field.
    """
    state = job.model.state_dict()
    # On rank 0; to find the folder, all vocabularies of the period before are hashed.
    meanings: dict[str, RowMeanings] = {}

    def keys(field: str, places: np.ndarray) -> np.ndarray:
        if not meanings:
            folder = data_folder(config)
            meanings.update(row_meanings(folder, remedy(folder)))
        return keys_of_rows(meanings[field], places)

    init = TableInit(config.model.init_std, job.front.columns.dim, config.run.seed)
    for field, places in rows.items():
        found = processes.on_main(lambda field=field, places=places: keys(field, places))
        table = state.get(weights_name(field))
        if table is None or not len(places):
            continue
        dim = table.size()[1]
        drawn = torch.from_numpy(drawn_by_id(found, init, table=table_name(field), dim=dim))
        order = torch.full((table.size()[0],), -1, dtype=torch.int64)
        order[torch.from_numpy(places)] = torch.arange(len(places))
        _copy_rows_(table, drawn, order)
    job.model.load_state_dict(state)


def _together(action: Any, group: dist.ProcessGroup) -> list[Any]:
    """Do it on all ranks, which fail together."""
    try:
        return together(action, group)
    except FailedSomewhereError as failure:
        error = RunFolderError(str(failure))
        error.known_to_all_ranks = True
        raise error from None


def progress_after(manifest: Manifest) -> Progress:
    """Where a run begins that takes all of another's state: schedules and rates go on."""
    before = manifest.progress
    return Progress(
        step=before.step,
        skipped_batches=before.skipped_batches,
        plateau=before.plateau,
        table_plateau=before.table_plateau,
    )


def _go_on_counting(job: Job, manifest: Manifest) -> None:
    # FBGEMM's own Adam counts its steps outside of its state.
    before = manifest.progress
    job.model.fused_optimizer.set_optimizer_step(before.step - before.skipped_batches)


def _read_whole(checkpoint: Path, manifest: Manifest, name: str) -> Tensor:
    saved = manifest.tensors[name]
    whole = torch.empty(saved.size, dtype=DTYPES[saved.dtype])
    read_tensors(checkpoint, {name: whole}, alone=True)
    return whole


def _states_of_table(manifest: Manifest, targets: Mapping[str, Any], weights: str) -> list[str]:
    """Names of the optimizer's states of a table that this process has."""
    begin = f"{_OF_TABLES}{weights.removeprefix(_MODEL)}."
    return [name for name in manifest.tensors if name.startswith(begin) and name in targets]


def _fitting_layers(
    manifest: Manifest, targets: Mapping[str, Any], takes_all: bool
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Layers of a job, with their moments if `takes_all`, that the checkpoint has, as tensors to
    be filled; and why other tensors begin anew.
    """
    fitting, new = {}, {}
    for name, target in targets.items():
        if not name.startswith(_MODEL) and not (takes_all and name.startswith(_OF_LAYERS)):
            new[name] = _NEW_RUN
        elif not name.startswith(f"{_MODEL}{TABLES}"):
            saved, now = manifest.tensors.get(name), list(target.size())
            if saved is None:
                new[name] = _ABSENT
            elif saved.size != now:
                new[name] = f"was {saved.size}, now {now}"
            else:
                fitting[name] = target
    return fitting, new


def _note(then: list[str], now: list[str]) -> str:
    """What a layer that sees fields by their place does not know, though its shape is the same."""
    if then == now or len(then) != len(now):
        return ""
    return (
        "the id fields are others, or in another order, and layers that tell them by their place "
        f"have learned of: {', '.join(then)}"
    )


class _Match(NamedTuple):
    """Which rows of the checkpoint's table a field's rows get.

    Attributes:
        rows: `[rows now]` int64, the row of the checkpoint's table for each, -1 where there is
            none; None where nothing fits.
        saved_rows: of the checkpoint's table; 0 where it has none.
        why: why nothing fits; else empty.
    """

    rows: np.ndarray | None
    saved_rows: int
    why: str = ""


class _Matching:
    """Matches the tables of a run with those of a checkpoint; only rank 0 reads vocabularies."""

    def __init__(
        self, source: Source, manifest: Manifest, config: Config, sizes: Mapping[str, int]
    ) -> None:
        self._source, self._tables = source, manifest.tables
        self._config, self._sizes = config, sizes

    def match(self, field: str) -> _Match:
        """A field's table.

        Raises:
            DataError: a vocabulary is damaged.
        """
        table = self._tables.get(table_name(field))
        if table is None:
            return _Match(None, 0, _ABSENT)
        now = {n: list(where) for n, where in StoredColumns(self._config.model.dim).names.items()}
        if table.columns != now:
            dims = (columns["embedding"][1] for columns in (table.columns, now))
            return _Match(None, table.rows, "dim was {}, now {}".format(*dims))
        was = _rows_are_ids(field, table.rows)
        if self._source.inputs is not None:
            was = self._saved[field]
        try:
            return _Match(matched_rows(was, self._now[field]), table.rows)
        except OtherMeaningError as reason:
            return _Match(None, table.rows, str(reason))

    @cached_property
    def _saved(self) -> dict[str, RowMeanings]:
        return row_meanings(self._source.inputs, _REMEDY)

    @cached_property
    def _now(self) -> dict[str, RowMeanings]:
        if isinstance(self._config.data, SyntheticSection):
            return {field: _rows_are_ids(field, rows) for field, rows in self._sizes.items()}
        folder = data_folder(self._config)
        return row_meanings(folder, remedy(folder))


def _rows_are_ids(field: str, rows: int) -> RowMeanings:
    return RowMeanings(FieldEntry(name=field, rows=rows))


@torch.no_grad()
def _copy_rows_(table: Tensor | ShardedTensor, whole: Tensor, rows: Tensor) -> None:
    """Overwrite rows of the parts of a table that this process has.

    Args:
        table: `[n]` or `[n, columns]`, on any device.
        whole: `[m]` or `[m, columns]`, on the CPU.
        rows: `[n]` int64, the row of `whole` for each of the table's, -1 for those that stay.
    """
    for part, (first_row, *first_column) in _parts(table):
        mine = rows[first_row : first_row + len(part)]
        columns = [
            slice(first, first + size)
            for first, size in zip(first_column, part.shape[1:], strict=True)
        ]
        for places in (mine >= 0).nonzero().squeeze(1).split(_PIECE):
            values = whole[(mine[places], *columns)]
            part[places.to(part.device)] = values.to(part)


def _has_rows_here(table: Tensor | ShardedTensor) -> bool:
    return any(part.numel() for part, _ in _parts(table))


def _parts(table: Tensor | ShardedTensor) -> Iterator[tuple[Tensor, list[int]]]:
    """This process's parts, and where they begin."""
    if not isinstance(table, ShardedTensor):
        yield table.detach(), [0] * table.dim()
        return
    for shard in table.local_shards():
        yield shard.tensor.detach(), list(shard.metadata.shard_offsets)


@dataclass(frozen=True)
class FieldReport:
    """What became of a field's table.

    Attributes:
        field: its name.
        rows: of the table now; 0 where the run has no such field.
        loaded: rows that have the values of the checkpoint.
        new: rows that have initial values.
        dropped: rows of the checkpoint's table that are in no row now.
        why: why none was loaded; else empty.
    """

    field: str
    rows: int
    loaded: int
    new: int
    dropped: int
    why: str

    def line(self, width: int) -> str:
        """The name, in so many columns at least, and the numbers."""
        numbers = (self.rows, self.loaded, self.new, self.dropped)
        return f"  {cut(self.field):<{width}}" + "".join(f"  {n:>13,}" for n in numbers)


@dataclass(frozen=True)
class LoadReport:
    """What became of a checkpoint.

    Attributes:
        checkpoint: its folder.
        step: that it was made after.
        fields: tables of the run, then those that only the checkpoint has.
        loaded: names of all other tensors that were loaded.
        new: names of all other tensors of the run, and why they begin anew.
        dropped: names of all other tensors of the checkpoint, and why they are not used.
        note: on the layers; or empty.
    """

    checkpoint: str
    step: int
    fields: list[FieldReport]
    loaded: list[str]
    new: Mapping[str, str]
    dropped: Mapping[str, str]
    note: str = ""

    def values(self) -> dict[str, Any]:
        """As it is written to a file."""
        return asdict(self)

    def lines(self) -> list[str]:
        """As it is shown, in at most 100 columns where names are not longer."""
        width = min(max([5, *(len(one.field) for one in self.fields)]), 32)
        columns = ("rows", "loaded", "new", "not taken")
        lines = [f"  {'field':<{width}}" + "".join(f"  {name:>13}" for name in columns)]
        for one in self.fields[:_MOST_FIELDS]:
            row, why = one.line(width), one.why and f"  {one.why}"
            lines += [row + why] if len(row + why) <= _WIDTH else [row, *_wrapped(f"    {why}", 6)]
        if len(self.fields) > _MOST_FIELDS:
            lines.append(f"  and {len(self.fields) - _MOST_FIELDS} more fields")
        keys = ("rows", "loaded", "new", "dropped")
        total = FieldReport("all", *(sum(getattr(f, key) for f in self.fields) for key in keys), "")
        lines.append(total.line(width))
        if not total.loaded:
            lines.append(
                "  NO ROW of a table was loaded: no field has the name, dim and kind of ids"
            )
        lines += self._tensors("dense layers", (_MODEL,))
        lines += _wrapped(f"    {self.note}", 4) if self.note else []
        return lines + self._tensors("optimizer state", _OPTIMIZERS)

    def _tensors(self, what: str, kinds: tuple[str, ...]) -> list[str]:
        loaded = sum(name.startswith(kinds) for name in self.loaded)
        lines = [f"  {what}: {loaded} tensors loaded"]
        others = {name: why for name, why in self.dropped.items() if name not in self.new}
        for told, tensors in (("begin anew", self.new), ("not taken", others)):
            by_reason: dict[str, list[str]] = {}
            for name, why in tensors.items():
                if name.startswith(kinds):
                    by_reason.setdefault(why, []).append(name.partition(".")[2])
            parts = [f"{_named(names)} ({why})" for why, names in by_reason.items()]
            lines += _wrapped(f"    {told}: {cut('; '.join(parts))}", 4) if parts else []
        return lines


def _named(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= _MOST_TENSORS else f"{len(names)} tensors"


def _wrapped(line: str, indent: int) -> list[str]:
    return textwrap.wrap(line, _WIDTH, subsequent_indent=" " * (indent + 4), break_on_hyphens=False)
