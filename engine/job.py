"""The job: model and optimizers; and the run that trains it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from stampede.data import Dataset
from stampede.engine.config import Config
from stampede.engine.optimizers import LearningRates
from stampede.engine.precision import DensePrecision
from stampede.engine.processes import Processes
from stampede.engine.run_folder import RunFolder
from stampede.models import CTRModel, EmbeddingFront
from stampede.optim import BackwardUpdate, DenseAdam, Scaled, local_cowclip_tables

if TYPE_CHECKING:
    from stampede.engine.checkpoint.manifest import Progress


@dataclass
class Job:
    """A sharded model with its optimizers.

    Attributes:
        model: the sharded model; its tables are updated in backward.
        dense_parameters: parameters of the dense layers, by name.
        dense_optimizer: their optimizer.
        scaling: settings at the base batch size and at the configured one.
        precision: of the dense layers.
        passes: the forward and backward passes of a step.
        table_update: updates tables with CowClip in backward.
        seed: of random numbers in the dense layers, such as dropout.
        skips_nonfinite: whether to skip a batch whose loss is not finite.
    """

    model: DistributedModelParallel
    dense_parameters: dict[str, Tensor]
    dense_optimizer: DenseAdam
    scaling: Scaled
    precision: DensePrecision
    passes: int = 1
    table_update: BackwardUpdate | None = None
    seed: int = 0
    skips_nonfinite: bool = False

    @property
    def ctr_model(self) -> CTRModel:
        """The model without its wrappers."""
        return self.model.module

    @property
    def dense_buffers(self) -> dict[str, Tensor]:
        """Buffers of the network, such as BatchNorm's running mean, by name."""
        return dict(self.ctr_model.network.named_buffers(prefix="network"))

    @property
    def front(self) -> EmbeddingFront:
        """The module with the tables."""
        return self.ctr_model.front

    def set_learning_rates(self, rates: LearningRates) -> None:
        """Set the rates of both optimizers for the next step."""
        for group in self.dense_optimizer.param_groups:
            group["lr"] = rates.dense
        for group in self.model.fused_optimizer.param_groups:
            group["lr"] = rates.embedding
        # Fused tables are updated in backward; step() only passes on the rate.
        self.model.fused_optimizer.step()


@dataclass
class TrainingRun:
    """A run in training, as seen by this process; rank 0 writes its folder."""

    config: Config
    processes: Processes
    folder: RunFolder
    dataset: Dataset
    job: Job
    progress: Progress

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
