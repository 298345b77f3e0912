"""A small run for faults to be injected into, and how it is launched."""

import shutil
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

from stampede.engine.checkpoint import newest
from stampede.engine.processes import rank_environment
from support.reading import OVERRIDES, prepared
from support.soak.disturbances import at_step, end_process
from support.soak.launching import Ended, Worker
from support.soak.runs import newest_step, same_end

# The last batch of an epoch has one sample, so that it is empty on all ranks but the first.
STEPS_AN_EPOCH, EPOCHS, EVERY = 11, 3, 4
STEPS = STEPS_AN_EPOCH * EPOCHS
_ROWS = 64 * (STEPS_AN_EPOCH - 1) + 1

JOB = [
    *OVERRIDES, f"train.epochs={EPOCHS}", "train.log_every=2", "evaluate.every=7",
    f"checkpoint.every_steps={EVERY}", "checkpoint.keep=3", "checkpoint.resume=auto",
    "sharding.plan=row_wise",
]  # fmt: skip

# The run that faults find has been killed after this step; steps 11, 12 and 16 are saved.
STOPPED_AFTER = 18

# Seconds in which a run of a second must end on a busy machine, whatever has happened to it.
DEADLINE = 900


class Processes:
    """One process of a run or several, each a `Worker`.

    Args:
        folder: for what they say.
        ranks: how many.
    """

    def __init__(self, folder, ranks):
        self._store = folder / f"store_{ranks}"
        self.workers = [Worker(folder / f"{ranks}_{rank}") for rank in range(ranks)]

    def start(self, arguments, disturbance=nullcontext, rank=0):
        """Begin to run the launcher, disturbed on one rank."""
        if not all(worker.is_alive for worker in self.workers):
            # As torchrun does: torch's process groups of a process are numbered since it began.
            self.close()
        ranks = len(self.workers)
        for other, worker in enumerate(self.workers):
            worker.start(
                arguments,
                disturbance if other == rank else nullcontext,
                rank_environment(other, ranks, self._store) if ranks > 1 else {},
            )

    def end(self, deadline=DEADLINE):
        """How all of them ended; their statuses must be the same."""
        try:
            ended = [worker.end(deadline) for worker in self.workers]
        except AssertionError:
            self.close()
            raise
        said = "".join(one.said for one in ended)
        statuses = {one.status for one in ended}
        assert len(statuses) == 1, (statuses, said)
        seconds = max(one.seconds for one in ended)
        return Ended(statuses.pop(), said, seconds, ended[0].place)

    def close(self):
        for worker in self.workers:
            worker.kill()


@dataclass
class Base:
    """What all cases share.

    Attributes:
        folder: for everything.
        processes: by number of ranks.
        second: a process besides.
    """

    folder: Path
    processes: dict[int, Processes] = field(default_factory=dict)
    _undisturbed: dict[int, Path] = field(default_factory=dict)

    def __post_init__(self):
        self.second = Processes(self.folder / "second", 1)
        prepared(self.folder / "data", train=_ROWS)
        self.job = self.folder / "small.yaml"
        self.job.write_text("")
        arguments = self.arguments(self.folder / "data", self.folder / "stopped")
        stopping = partial(at_step, STOPPED_AFTER + 1, end_process)
        ranks = self.of(1)
        ranks.start([*arguments, "checkpoint.asynchronous=false"], stopping)
        assert ranks.end().status == 137
        assert newest_step(self.folder / "stopped/small") == 16

    def arguments(self, data, runs):
        return [self.job, "data.kind=prepared", f"data.path={data}", f"run.dir={runs}", *JOB]

    def of(self, ranks):
        """Processes that are there already."""
        if ranks not in self.processes:
            self.processes[ranks] = Processes(self.folder / "said", ranks)
        return self.processes[ranks]

    def undisturbed(self, ranks):
        """The run that nothing happened to."""
        if ranks not in self._undisturbed:
            runs = self.folder / f"undisturbed_{ranks}"
            self.of(ranks).start(self.arguments(self.folder / "data", runs))
            ended = self.of(ranks).end()
            assert ended.status == 0, ended.said
            self._undisturbed[ranks] = runs / "small"
        return self._undisturbed[ranks]

    def close(self):
        for processes in (*self.processes.values(), self.second):
            processes.close()


@dataclass
class Case:
    """A run of its own, to which one fault happens.

    Args:
        base: what all share.
        number: of the case.
        ranks: processes.
        begun: whether the run has been stopped after `STOPPED_AFTER` steps; else it is to begin.
    """

    base: Base
    number: str
    ranks: int
    begun: bool

    def __post_init__(self):
        self.draw = Random(self.number)
        self.folder = self.base.folder / "case"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.data = Path(shutil.copytree(self.base.folder / "data", self.folder / "data"))
        self.runs = self.folder / "runs"
        if self.begun:
            shutil.copytree(self.base.folder / "stopped", self.runs)
        else:
            self.runs.mkdir()
        self.run = self.runs / "small"
        self.processes = self.base.of(self.ranks)
        self.second = self.base.second

    @property
    def worker(self):
        """The process of rank 0."""
        return self.processes.workers[0]

    @property
    def checkpoint(self):
        """The newest one."""
        return newest(self.run / "checkpoints")

    def arguments(self, *overrides):
        return [*self.base.arguments(self.data, self.runs), *overrides]

    def a_step(self, first=2):
        """A step that this run has yet to take."""
        return self.draw.randrange(STOPPED_AFTER + first if self.begun else first, STEPS)

    def a_file(self, folder, pattern="*"):
        """One of the files of a folder."""
        return self.draw.choice(sorted(path for path in folder.glob(pattern) if path.is_file()))

    def check_end(self):
        """Check that the run has come to the same as the undisturbed one."""
        same_end(self.run, self.base.undisturbed(self.ranks))
