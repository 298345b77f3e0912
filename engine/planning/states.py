"""Bytes of optimizer state that a row of a table takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from stampede.engine.config import Config
from stampede.engine.scaled import scaled_hyperparameters
from stampede.engine.table_optimizer import table_optimizer
from stampede.optim import Helen
from stampede.optim.baselines import BASELINES
from stampede.optim.settings import UpdateSettings
from stampede.optim.table_array import TableArray, TableShard
from stampede.optim.waiting_rows import is_replayable

FLOAT = 4
# int32, see `optim/waiting_rows.py`.
STEP_COUNTER = 4


@dataclass(frozen=True)
class TableStates:
    """The state of the tables' optimizer.

    Attributes:
        optimizer: `optim.embedding.optimizer`.
        dim: columns of a stored row.
        settings: of its update; None for FBGEMM's own optimizers.
    """

    optimizer: str
    dim: int
    settings: UpdateSettings | None

    def per_row(self, columns: int, column_offset: int = 0) -> int:
        """Bytes of state of a row of a shard.

        Args:
            columns, column_offset: width of the shard, and where it begins.
        """
        if self.settings is None:
            return _of_fbgemm(self.optimizer, columns)
        own = _of_array(self.settings, columns, column_offset, self.dim)
        return own + (STEP_COUNTER if self.counts_steps else 0)

    @property
    def counts_steps(self) -> bool:
        """Whether a row keeps the number of the step it is at, see `WaitingRows`.

        Counted for every device, also for those that have no kernel to make up for missed steps.
        """
        # Helen's rows take all their steps at once.
        waits = self.settings is not None and self.optimizer != "helen"
        return waits and is_replayable(self.settings)

    @property
    def values_per_row(self) -> int:
        """Values of a row that are summed over the shards of its columns; see `RowValues`."""
        if self.settings is None:
            return 0
        clipped = self.settings.clip.columns
        rest = 2 if clipped is not None and clipped < self.dim else 1
        return 3 + rest * len(self.settings.rule.row_states)

    @property
    def needs_all_rows(self) -> bool:
        """Whether a step holds these values of every row."""
        return self.settings is not None and self.settings.needs_all_rows


def table_states(config: Config, columns: int, dim: int) -> TableStates:
    """The state that a configuration asks for.

    Args:
        columns: how many columns of a stored row are the embedding.
        dim: columns of a stored row.
    """
    optimizer = config.optim.embedding.optimizer
    if optimizer in BASELINES:
        return TableStates(optimizer, dim, None)
    # Where the tables lie makes no difference to what is kept.
    kind, arguments = table_optimizer(
        config, scaled_hyperparameters(config).scaled, columns, torch.device("cpu")
    )
    if issubclass(kind, Helen):
        settings = kind.table_settings(arguments)[0].second_pass()
    else:
        settings = kind.update_settings(kind.defaults_with(arguments))
    return TableStates(optimizer, dim, settings)


def _of_fbgemm(optimizer: str, columns: int) -> int:
    """FBGEMM's own: a sum a row; that, a counter and a step; two moments a weight."""
    return (
        FLOAT
        * {
            "fbgemm_rowwise_adagrad": 1,
            "fbgemm_cowclip": 3,
            "fbgemm_adam": 2 * columns,
        }[optimizer]
    )


@lru_cache(maxsize=256)
def _of_array(settings: UpdateSettings, columns: int, column_offset: int, dim: int) -> int:
    """As the tables themselves make it, for a table of one row."""
    weights = torch.zeros(1, columns)
    shard = TableShard("planned", 1, column_offset=column_offset)
    array = TableArray.create([shard], weights, settings, dim)
    return sum(tensor.nbytes for tensor in _tensors(array) if tensor is not weights)


def _tensors(held: Any) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, Mapping):
        for value in held.values():
            yield from _tensors(value)
    elif is_dataclass(held):
        for field in fields(held):
            yield from _tensors(getattr(held, field.name))
