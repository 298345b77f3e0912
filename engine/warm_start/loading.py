"""What of a checkpoint fits a job, put into it: rows of tables by their ids, the rest by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stampede.engine.checkpoint import Manifest, flat_keys, read_manifest, read_tensors
from stampede.engine.checkpoint.contents import contents
from stampede.engine.checkpoint.layout import DTYPES
from stampede.engine.checkpoint.manifest import weights_key, weights_name
from stampede.engine.checkpoint.same_network import TABLES
from stampede.engine.checkpoint.together import together
from stampede.engine.errors import RunFolderError
from stampede.engine.job import Job
from stampede.engine.processes import PATIENCE, Processes
from stampede.engine.warm_start.matching import FieldMatch, Matching
from stampede.engine.warm_start.report import FieldReport, LoadReport
from stampede.engine.warm_start.rows import copy_rows_, has_rows_here
from stampede.engine.warm_start.source import Source
from stampede.models import CTRModel

_ABSENT = "not in the checkpoint"
_UNUSED = "not in this run"
_WITH_ITS_TABLE = "as its table"

# Names of tables, of which a process may hold some only.
_TABLES = f"model.{TABLES}"

_NUMBER_WEIGHTS = "model.number_weights.weight"


class States(NamedTuple):
    """Which states of optimizers go along.

    Attributes:
        tables, dense: why those of the tables and of the dense layers do not; None where they do.
    """

    tables: str | None = None
    dense: str | None = None


class _Outcome(NamedTuple):
    """Names of tensors, weights of tables aside, that a rank has loaded, and why it has others
    not."""

    loaded: set[str]
    new: dict[str, str]


def load_matching(
    source: Source, matching: Matching, job: Job, processes: Processes, states: States
) -> LoadReport:
    """Put what fits into a job, on any number of ranks and under any sharding plan.

    Rank 0 looks up the ids of one field after the other. Of a tensor of a table that it has a part
    of, a rank reads the whole: besides its own tables it holds one such tensor at a time, twice
    while it is read, and the matched rows as int64. All ranks must call it.

    Args:
        matching: of the same source.
        states: which states of optimizers are loaded.

    Returns:
        What was loaded and what not; the same on all ranks.

    Raises:
        RunFolderError, DataError: the checkpoint or a vocabulary is damaged.
    """
    manifest = read_manifest(source.checkpoint)
    # All ranks at one point: rows that are behind take their steps.
    state = contents(job, processes.rank)
    del state["random"]
    here = _Here(source, manifest, flat_keys(state), states, job.ctr_model)
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    fields = []
    for field in job.front.fields:
        match = processes.on_main(lambda field=field: matching.match(field))
        fields.append(_field_report(field, match, matching.sizes))
        _agreed(lambda field=field, match=match: here.load_table(field, match), group)
    _agreed(here.load_dense, group)
    outcomes = together(lambda: here.outcome, group)
    fields += [
        FieldReport(table.field, 0, 0, 0, table.rows, _UNUSED)
        for table in manifest.tables.values()
        if table.field not in job.front.fields
    ]
    report = _report(source, manifest, fields, outcomes, states)
    job.model.load_state_dict(state["model"])
    return report


def _agreed(action: Callable[[], None], group: dist.ProcessGroup) -> None:
    """Do it on all ranks; all raise the error of the first rank that has one."""
    said: str | None = None
    try:
        action()
    except RunFolderError as failure:
        said = str(failure)
    sentences = [said] * dist.get_world_size(group)
    dist.all_gather_object(sentences, said, group=group)
    for sentence in filter(None, sentences):
        error = RunFolderError(sentence)
        error.known_to_all_ranks = True
        raise error


class _Here:
    """This rank's part of the work.

    Attributes:
        outcome: so far.
    """

    def __init__(
        self,
        source: Source,
        manifest: Manifest,
        targets: dict[str, Any],
        states: States,
        model: CTRModel,
    ) -> None:
        self._checkpoint = source.checkpoint
        self._saved = manifest.tensors
        self._targets = targets
        self._states = states
        # What stored first-order weights are multiplied by, for scores to stay what they are.
        self._ratio = manifest.first_order_scale / model.first_order_scale
        self._first_order = slice(*model.front.columns.names["first_order"])
        self.outcome = _Outcome(set(), {})

    def load_table(self, field: str, match: FieldMatch) -> None:
        """A field's weights, and what its optimizer keeps for each row."""
        prefix = f"fused.{weights_name(field)}."
        own = [name for name in self._targets if name.startswith(prefix)]
        why_not = self._states.tables or (match.why and _WITH_ITS_TABLE)
        rows = None if match.rows is None else torch.from_numpy(match.rows)
        if rows is not None and weights_key(field) in self._targets:
            self._copy(weights_key(field), rows)
        for name in own:
            reason = why_not or self._misfit(name, match.saved_rows)
            if reason:
                self.outcome.new[name] = reason
                continue
            if self._targets[name].size():
                self._copy(name, rows)
            else:
                self._read([name])
            self.outcome.loaded.add(name)

    def load_dense(self) -> None:
        """Layers, and the states of their optimizer, each by name and shape."""
        layers = [
            name
            for name in self._targets
            if name.startswith("model.") and not name.startswith(_TABLES)
        ]
        fitting = self._sorted_out(layers)
        # A parameter's states stay together: moments without their number of steps are biased.
        by_parameter: dict[str, list[str]] = {}
        for name in self._targets:
            if name.startswith("dense."):
                by_parameter.setdefault(name.rpartition(".")[0], []).append(name)
        for names in by_parameter.values():
            reasons = [self._states.dense or self._misfit(name) for name in names]
            reason = next(filter(None, reasons), "")
            if reason:
                self.outcome.new.update(dict.fromkeys(names, reason))
            else:
                fitting += names
        self._read(fitting)
        self.outcome.loaded.update(fitting)

    def _sorted_out(self, names: Iterable[str]) -> list[str]:
        fitting = []
        for name in names:
            reason = self._misfit(name)
            if reason:
                self.outcome.new[name] = reason
            else:
                fitting.append(name)
        return fitting

    def _misfit(self, name: str, saved_rows: int | None = None) -> str:
        """Why a tensor is not loaded; empty where it fits.

        Args:
            saved_rows: of the checkpoint's table, where the tensor has a value for each row.
        """
        saved = self._saved.get(name)
        if saved is None:
            return _ABSENT
        then, now = saved.size, list(self._targets[name].size())
        if saved_rows is not None and now:
            fits = then[:1] == [saved_rows] and then[1:] == now[1:]
        else:
            fits = then == now
        return "" if fits else f"was {then}, now {now}"

    def _copy(self, name: str, rows: Tensor) -> None:
        target, saved = self._targets[name], self._saved[name]
        if not has_rows_here(target):
            return
        whole = torch.empty(saved.size, dtype=DTYPES[saved.dtype])
        read_tensors(self._checkpoint, {name: whole}, alone=True)
        if name.startswith(_TABLES):
            whole[:, self._first_order] *= self._ratio
        copy_rows_(target, whole, rows)

    def _read(self, names: list[str]) -> None:
        if names:
            tensors = {name: self._targets[name] for name in names}
            read_tensors(self._checkpoint, tensors, alone=True)
            if _NUMBER_WEIGHTS in names:
                self._targets[_NUMBER_WEIGHTS].detach().mul_(self._ratio)


def _field_report(field: str, match: FieldMatch, sizes: Mapping[str, int]) -> FieldReport:
    rows = sizes[field]
    loaded = 0 if match.rows is None else int((match.rows >= 0).sum())
    return FieldReport(field, rows, loaded, rows - loaded, match.saved_rows - loaded, match.why)


def _report(
    source: Source,
    manifest: Manifest,
    fields: list[FieldReport],
    outcomes: list[_Outcome],
    states: States,
) -> LoadReport:
    loaded = set().union(*(outcome.loaded for outcome in outcomes))
    new = {name: why for outcome in outcomes for name, why in outcome.new.items()}
    tables = {weights_key(one.field) for one in fields}
    dropped = {}
    for name in manifest.tensors:
        if name in loaded or name in tables or name.startswith("random."):
            continue
        kind = {"fused": states.tables, "dense": states.dense}.get(name.partition(".")[0])
        dropped[name] = kind or new.get(name, _UNUSED)
    return LoadReport(
        str(source.checkpoint),
        manifest.progress.step,
        fields,
        sorted(loaded),
        dict(sorted(new.items())),
        dict(sorted(dropped.items())),
        _note([*manifest.data.vocabulary_sizes], [one.field for one in fields if one.rows]),
    )


def _note(then: list[str], now: list[str]) -> str:
    """What a layer that sees fields by their place does not know, though its shape is the same."""
    if then == now or len(then) != len(now):
        return ""
    return (
        "the id fields are others, or in another order, and layers that tell them by their place "
        f"have learned of: {', '.join(then)}"
    )
