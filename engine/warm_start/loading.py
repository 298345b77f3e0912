"""What of a checkpoint fits a job, put into it: rows of tables by their ids, the rest by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stampede.engine.checkpoint import Manifest, flat_keys, read_manifest, read_tensors
from stampede.engine.checkpoint.contents import contents
from stampede.engine.checkpoint.layout import DTYPES
from stampede.engine.checkpoint.manifest import weights_key
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
_NEW_RUN = "a new run's optimizers begin anew"

# Names of tables, of which a process may hold some only.
_TABLES = f"model.{TABLES}"

_NUMBER_WEIGHTS = "model.number_weights.weight"


class _Outcome(NamedTuple):
    """Names of layers' tensors that a rank has loaded, and why it has others not."""

    loaded: set[str]
    new: dict[str, str]


def load_matching(source: Source, matching: Matching, job: Job, processes: Processes) -> LoadReport:
    """Put the weights that fit into a job, on any number of ranks and under any sharding plan.

    Rank 0 looks up the ids of one field after the other. Of a tensor of a table that it has a part
    of, a rank reads the whole: besides its own tables it holds one such tensor at a time, twice
    while it is read, and the matched rows as int64. All ranks must call it.

    Args:
        matching: of the same source.

    Returns:
        What was loaded and what not; the same on all ranks.

    Raises:
        RunFolderError, DataError: the checkpoint or a vocabulary is damaged.
    """
    manifest = read_manifest(source.checkpoint)
    # All ranks at one point: rows that are behind take their steps.
    state = contents(job, processes.rank)
    del state["random"]
    here = _Here(source, manifest, flat_keys(state), job.ctr_model)
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
    report = _report(source, manifest, fields, outcomes)
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
        self, source: Source, manifest: Manifest, targets: dict[str, Any], model: CTRModel
    ) -> None:
        self._checkpoint = source.checkpoint
        self._saved = manifest.tensors
        self._targets = targets
        # What stored first-order weights are multiplied by, for scores to stay what they are.
        self._ratio = manifest.first_order_scale / model.first_order_scale
        self._first_order = slice(*model.front.columns.names["first_order"])
        states = [name for name in targets if name.startswith(("fused.", "dense."))]
        self.outcome = _Outcome(set(), dict.fromkeys(states, _NEW_RUN))

    def load_table(self, field: str, match: FieldMatch) -> None:
        """A field's weights."""
        if match.rows is not None and weights_key(field) in self._targets:
            self._copy(weights_key(field), torch.from_numpy(match.rows))

    def load_dense(self) -> None:
        """Layers, each by name and shape."""
        for name, target in self._targets.items():
            if not name.startswith("model.") or name.startswith(_TABLES):
                continue
            saved, now = self._saved.get(name), list(target.size())
            if saved is None:
                self.outcome.new[name] = _ABSENT
            elif saved.size != now:
                self.outcome.new[name] = f"was {saved.size}, now {now}"
            else:
                self.outcome.loaded.add(name)
        fitting = {name: self._targets[name] for name in self.outcome.loaded}
        if fitting:
            read_tensors(self._checkpoint, fitting, alone=True)
        if _NUMBER_WEIGHTS in fitting:
            fitting[_NUMBER_WEIGHTS].detach().mul_(self._ratio)

    def _copy(self, name: str, rows: Tensor) -> None:
        target, saved = self._targets[name], self._saved[name]
        if not has_rows_here(target):
            return
        whole = torch.empty(saved.size, dtype=DTYPES[saved.dtype])
        read_tensors(self._checkpoint, {name: whole}, alone=True)
        if name.startswith(_TABLES):
            whole[:, self._first_order] *= self._ratio
        copy_rows_(target, whole, rows)


def _field_report(field: str, match: FieldMatch, sizes: Mapping[str, int]) -> FieldReport:
    rows = sizes[field]
    loaded = 0 if match.rows is None else int((match.rows >= 0).sum())
    return FieldReport(field, rows, loaded, rows - loaded, match.saved_rows - loaded, match.why)


def _report(
    source: Source,
    manifest: Manifest,
    fields: list[FieldReport],
    outcomes: list[_Outcome],
) -> LoadReport:
    loaded = set().union(*(outcome.loaded for outcome in outcomes))
    new = {name: why for outcome in outcomes for name, why in outcome.new.items()}
    tables = {weights_key(one.field) for one in fields}
    dropped = {}
    for name in manifest.tensors:
        if name in loaded or name in tables or name.startswith("random."):
            continue
        is_state = name.startswith(("fused.", "dense."))
        dropped[name] = _NEW_RUN if is_state else new.get(name, _UNUSED)
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
