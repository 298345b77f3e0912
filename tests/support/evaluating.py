"""Evaluations of scores that are known beforehand, in one process or in several."""

from pathlib import Path

import numpy as np
from torch import nn

import stampede.engine.evaluate as evaluation
from stampede.data import GlobalBatches
from stampede.data.prepared.reader import open_prepared
from stampede.engine import metrics
from stampede.engine.config import EvaluateSection
from stampede.engine.errors import TrainingStoppedError
from stampede.engine.processes import processes
from support.movie_runs import train_on_movies
from support.prepared import drawn_fields, drawn_rows, write_prepared

BATCH = 128


def scored_rows(rows, weighted, seed=0):
    """Rows whose first number is their score, with ties; `ids[:, 0]` makes 40 groups.

    `write_prepared` says that row 0 is that of missing values.
    """
    arrays = drawn_rows(rows, weight=weighted, vocabulary=40, seed=seed)
    draw = np.random.default_rng(seed)
    arrays["numbers"][:, 0] = (arrays["label"] + draw.normal(-1, 1, rows)).round(2)
    return arrays


def write_scored(folder: Path, rows, weighted):
    return write_prepared(
        folder,
        {"train": scored_rows(10, weighted), "test": scored_rows(rows, weighted, seed=1)},
        drawn_fields(vocabulary=40),
    )


class KnownScores(nn.Module):
    def forward(self, sparse, dense):
        return dense[:, 0]


def evaluate_known(folder, settings, together=500):
    """The evaluation of the test part by this rank, as the engine does it."""
    evaluation._TOGETHER = together
    with processes("cpu") as here:
        dataset = open_prepared(folder)
        fields = list(dataset.vocabulary_sizes)
        batches = GlobalBatches(
            dataset.test,
            fields,
            BATCH,
            here.rank,
            here.world_size,
            unknown_rows=dataset.unknown_rows,
        )
        section = EvaluateSection(**settings)
        return evaluation.evaluate(KnownScores(), batches, here, section)


def evaluate_without_memory(folder, settings):
    """What the error says where the scores cannot be sorted."""

    def fails(*_):
        raise MemoryError("Unable to allocate 7 TiB")

    metrics._Records.add = fails
    try:
        evaluate_known(folder, settings)
    except TrainingStoppedError as failure:
        return str(failure)
    return None


def run_by_user(folder, world_size=1):
    """The folder of a whole run on a log of films, GAUC by its users; also as a rank of several."""
    name = f"run.name=ranks{world_size}"
    return train_on_movies(folder, "evaluate.group_by=user", name, world_size=world_size)
