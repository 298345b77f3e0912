"""Runs that are stopped at a chosen step, on one or several ranks, and runs that are not."""

import math
import os
import signal
from functools import cache
from pathlib import Path

import pytest

from stampede.engine.errors import InterruptedRunError
from stampede.engine.training import trainer
from support.jobs import run_small
from support.ranks import run_ranks


def before_step(patch, number, action):
    """Do something before step `number` is taken."""
    step = trainer.train_step

    def disturbed(job, sent, now, *further):
        if now == number:
            action()
        return step(job, sent, now, *further)

    patch.setattr(trainer, "train_step", disturbed)


def ask_to_stop():
    """What a scheduler does."""
    os.kill(os.getpid(), signal.SIGTERM)


def run_disturbed(folder: Path, overrides: list[str], step: int, action=ask_to_stop):
    """A whole run; before step `step` it is asked to stop, or killed. Returns the error."""
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, step, action)
        with pytest.raises((InterruptedRunError, KilledError)) as stop:
            run_small(folder, overrides)
    return stop.value


class KilledError(Exception):
    """Stands for a kill: nothing is written any more."""


def kill():
    raise KilledError


class Setting:
    """In place of a `MonkeyPatch`, in a process that ends soon."""

    setattr = staticmethod(setattr)


def poisoned(patch, at, on_rank=0, value=math.nan):
    """Put a NaN or another value into the batches of some steps.

    What follows from it is the run's own.
    """
    take = trainer.train_step

    def disturbed(job, sent, step, *further):
        if step in at and int(os.environ.get("RANK", "0")) == on_rank:
            sent.batch.dense[0, 0] = value
        return take(job, sent, step, *further)

    patch.setattr(trainer, "train_step", disturbed)


def stopped_on_last_rank(folder: Path, overrides: list[str], world_size: int, step: int) -> str:
    """The sentence of a run of which only the last rank was asked to stop; as a rank of several."""
    if int(os.environ["RANK"]) == world_size - 1:
        before_step(Setting, step, ask_to_stop)
    try:
        run_small(folder, overrides, world_size)
    except InterruptedRunError as stop:
        return str(stop)
    return "not stopped"


def undisturbed_runs(tmp_path_factory, overrides):
    """A function that gives the folder of a run that nothing happens to.

    Its arguments are the number of ranks, and further overrides.
    """

    @cache
    def run(ranks, *more):
        folder = tmp_path_factory.mktemp(f"undisturbed_{ranks}")
        run_ranks(ranks, run_small, folder, [*overrides, *more], ranks)
        return folder / "small"

    return run
