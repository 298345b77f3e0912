"""Bytes of a table row's state and of a sample in the dense layers: measured, not calculated."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from stampede.engine.config import Config
from stampede.engine.optimizers import scaled_hyperparameters, table_optimizer
from stampede.models import CTRModel
from stampede.optim import Helen
from stampede.optim.baselines import BASELINES
from stampede.optim.settings import UpdateSettings
from stampede.optim.table_array import TableArray, TableShard
from stampede.optim.waiting_rows import is_replayable

FLOAT = 4
# int32, see `optim/waiting_rows.py`.
_STEP_COUNTER = 4

# Batch sizes of two passes; their difference in memory gives the memory of a sample.
_SAMPLES = (16, 32)


@dataclass(frozen=True)
class TableStates:
    """The state of the tables' optimizer.

    Attributes:
        optimizer: `optim.embedding.optimizer`.
        dim: columns of a stored row.
        settings: of its update; None for an FBGEMM baseline.
    """

    optimizer: str
    dim: int
    settings: UpdateSettings | None

    @classmethod
    def of(cls, config: Config, columns: int, dim: int) -> TableStates:
        """The state of a configuration's optimizer, for embeddings of so many columns."""
        optimizer = config.optim.embedding.optimizer
        if optimizer in BASELINES:
            return cls(optimizer, dim, None)
        # The state is the same on every device.
        kind, arguments = table_optimizer(
            config, scaled_hyperparameters(config).scaled, columns, torch.device("cpu")
        )
        if issubclass(kind, Helen):
            return cls(optimizer, dim, kind.table_settings(arguments)[0].second_pass())
        return cls(optimizer, dim, kind.update_settings(kind.defaults_with(arguments)))

    def per_row(self, columns: int, column_offset: int = 0) -> int:
        """Bytes of state per row of a shard with these columns."""
        if self.settings is None:
            # A sum per row; that, a counter and a step; two moments per weight.
            values = {"fbgemm_rowwise_adagrad": 1, "fbgemm_cowclip": 3, "fbgemm_adam": 2 * columns}
            return FLOAT * values[self.optimizer]
        # Counted on every device, although some have no kernel that makes up for missed steps.
        # With Helen no row misses a step.
        counts_steps = self.optimizer != "helen" and is_replayable(self.settings)
        own = _state_bytes(self.settings, columns, column_offset, self.dim)
        return own + _STEP_COUNTER * counts_steps

    @property
    def values_per_row(self) -> int:
        """Values per row that ranks sum if they share its columns; see `RowValues`."""
        if self.settings is None:
            return 0
        clipped = self.settings.clip.columns
        rest = 2 if clipped is not None and clipped < self.dim else 1
        return 3 + rest * len(self.settings.rule.row_states) + bool(self.settings.ar_alpha)

    @property
    def needs_all_rows(self) -> bool:
        """Whether a step makes these values for every row."""
        return self.settings is not None and self.settings.needs_all_rows


@lru_cache(maxsize=256)
def _state_bytes(settings: UpdateSettings, columns: int, column_offset: int, dim: int) -> int:
    """Measured on a table of one row."""
    shard = TableShard("planned", 1, column_offset=column_offset)
    array = TableArray.create([shard], torch.zeros(1, columns), settings, dim)
    return sum(state.nbytes for state in array.states.values())


def activation_bytes_per_sample(model: CTRModel) -> int:
    """Peak memory of forward and backward in bytes per sample.

    Runs a few samples on the CPU in float32. Counts the gradient of the looked-up rows, but not the
    rows themselves, nor weights and their gradients.

    Args:
        model: with dense layers on the CPU and tables on `meta`; it does not change.
    """
    front, count = model.front, len(model.front.fields)
    # A copy of all but the tables, so that running means and the like do not change.
    dense = copy.deepcopy(model, {id(front): front})
    peaks = []
    with torch.random.fork_rng(devices=[]):
        for samples in _SAMPLES:
            rows = torch.randn(samples, count * front.columns.stored, requires_grad=True)
            inputs = torch.randn(samples, model.numbers)
            with _LiveBytes([rows, inputs, *dense.parameters(), *dense.buffers()]) as live:
                logits = dense.logits(rows, inputs)
                # A network need not use its embeddings.
                torch.autograd.grad(logits.sum(), rows, allow_unused=True)
            peaks.append(live.peak)
    return -(-(peaks[1] - peaks[0]) // (_SAMPLES[1] - _SAMPLES[0]))


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors, other than the known ones, that operations make; `peak` is the
    most that are alive at a time.
    """

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.peak = self._live = 0
        self._storages = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(
        self,
        operation: Any,
        kinds: Sequence[type],
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        made = operation(*arguments, **(named or {}))
        tree_map_only(Tensor, self._count, made)
        return made

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages.add(storage._cdata)
            self._live += storage.nbytes()
            self.peak = max(self.peak, self._live)
            weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, key: int, size: int) -> None:
        self._storages.discard(key)
        self._live -= size
