"""Scores a period by the model of the period before, if a new model is trained on its rows."""

from __future__ import annotations

import os

from stampede.data.prepared.manifest import read_manifest
from stampede.engine.checkpoint.resume import begin, find_beginning
from stampede.engine.config import Config, goal_weights
from stampede.engine.config.recipe import with_recipe
from stampede.engine.job.build import build
from stampede.engine.periods.scored_before import ScoredBefore
from stampede.engine.processes import Processes
from stampede.engine.reading import Reader, data_folder, open_dataset
from stampede.engine.results.run_folder import RunFolder
from stampede.engine.training.evaluate import evaluate
from stampede.engine.watching.hang import watched


def score_before(config: Config, here: Processes, period: int) -> ScoredBefore:
    """Score the rows of a period with the weights that it begins with; all ranks must call it.

    Writes nothing but prepared data.

    Args:
        config: of a run that goes on with the model before.
        period: its number.
    """
    folder = RunFolder(os.path.join(config.run.dir, config.run.name))
    found = find_beginning(config, folder, False, here)
    with watched(here, config.run, folder.path):
        with here.heartbeat.slowly("preparing data"):
            dataset = open_dataset(config, here)
        rows = dataset.train.rows + dataset.rows_before
        config, _ = with_recipe(config, rows, len(dataset.vocabulary_sizes), here.world_size)
        with here.heartbeat.slowly("loading"):
            job = build(config, dataset, here)
            begin(found, config, job, dataset, here)
        reader = Reader(config, dataset, here)
        goals = goal_weights(config, dataset.goals)
        batches = reader.evaluation(reader.dataset.test)
        given = config.evaluate, None, dataset.unseen_rows, goals
        metrics = evaluate(job.model, batches, here, *given)
    source = here.on_main(lambda: read_manifest(data_folder(config)).source)
    return ScoredBefore(period, metrics, source)
