"""Training within this process, step by step, as the launcher does it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from timing import seconds_of

from stampede.data import Batch, Dataset, GlobalBatches
from stampede.engine.config import Config
from stampede.engine.config.load import load_config
from stampede.engine.job import Job
from stampede.engine.job.build import build
from stampede.engine.job.optimizers import LearningRates
from stampede.engine.processes import Processes, processes
from stampede.engine.reading import Reader, open_dataset
from stampede.engine.start_up import launched_world_size, quiet_libraries
from stampede.engine.step import prefetch, train_step
from stampede.optim import local_cowclip_tables

DEEPFM = Path(__file__).with_name("deepfm.yaml")


@dataclass
class Training:
    """A job whose steps can be taken one by one.

    Attributes:
        batches: of the training part, epoch after epoch.
        steps: taken so far.
    """

    config: Config
    dataset: Dataset
    job: Job
    processes: Processes
    batches: GlobalBatches
    steps: int = 0

    def __post_init__(self) -> None:
        here = self.processes
        self._sent = prefetch(self._epochs(), self.job.front, here.device, heartbeat=here.heartbeat)

    def _epochs(self) -> Iterator[Batch]:
        while True:
            batches = iter(self.batches)
            while (batch := self.read(batches)) is not None:
                yield batch

    def read(self, batches: Iterator[Batch]) -> Batch | None:
        """The next batch of an epoch; None after its last."""
        return next(batches, None)

    def step(self) -> None:
        """Train on the next batch."""
        sent, epoch = next(self._sent), len(self.batches)
        rates = LearningRates(self.config, self.job.scaling.scaled, epoch, epoch * 1000)
        self.job.set_learning_rates(*rates.after(self.steps))
        self.steps += 1
        train_step(self.job, sent, self.steps, self.processes)

    def flush(self) -> None:
        """Bring all rows up to date."""
        for tables in local_cowclip_tables(self.job.model):
            tables.flush()

    def seconds(self, steps: int) -> float:
        """Seconds of `steps` steps and the flush of all rows after them."""
        return seconds_of(lambda: ([self.step() for _ in range(steps)], self.flush()))


@contextmanager
def training(overrides: list[str], file: Path = DEEPFM) -> Iterator[Training]:
    """Build a job, by default DeepFM on the prepared clicks that `data.path` names."""
    quiet_libraries()
    config = load_config(file, overrides, launched_world_size())
    with processes("cpu") as here:
        dataset = open_dataset(config, here)
        job = build(config, dataset, here)
        yield Training(config, dataset, job, here, Reader(config, dataset, here).training())
