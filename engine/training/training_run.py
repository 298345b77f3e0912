"""A run in training, as its parts share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from stampede.data import Dataset
from stampede.engine.config import Config
from stampede.engine.job import Job
from stampede.engine.processes import Processes
from stampede.engine.results.run_folder import RunFolder
from stampede.engine.training.progress import Progress
from stampede.optim import local_cowclip_tables

# Of an epoch's metrics by part; whether training ends.
AfterEpoch = Callable[[Mapping[str, dict[str, Any]]], bool | None]


@dataclass
class TrainingRun:
    """A run in training, as seen by this process; rank 0 writes its folder.

    Attributes:
        after_epoch: called on rank 0 after each epoch that was evaluated, see `stampede.train`.
    """

    config: Config
    processes: Processes
    folder: RunFolder
    dataset: Dataset
    job: Job
    progress: Progress
    after_epoch: AfterEpoch | None = None

    def is_enough(self) -> bool:
        """Whether `after_epoch` ends the training here; all ranks must call it."""
        asked = self.after_epoch
        return asked is not None and bool(self.processes.on_main(lambda: asked(self.progress.last)))

    def log(self, line: dict[str, object]) -> None:
        """Append a line to `metrics.jsonl`; all ranks must call it."""
        self.processes.on_main(lambda: self.folder.log(line))
        self.progress.metrics_lines = self.folder.metrics_lines

    def add_row_counts(self) -> None:
        """Add the rows touched, clipped and skipped since the last call to the progress.

        All ranks must call it.
        """
        counts = torch.zeros(3, dtype=torch.int64, device=self.processes.device)
        for tables in local_cowclip_tables(self.job.model):
            counts += tables.row_counts
            tables.row_counts.zero_()
        dist.all_reduce(counts)
        touched, clipped, skipped = counts.tolist()
        self.progress.touched_rows += touched
        self.progress.clipped_rows += clipped
        self.progress.skipped_rows += skipped
