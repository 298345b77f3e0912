"""Runs that begin with what others have learned, and what is then in their tables."""

from dataclasses import asdict
from pathlib import Path

import polars as pl

from stampede.data.prepared.manifest import read_manifest as read_prepared
from stampede.engine.build import build
from stampede.engine.checkpoint.retention import newest
from stampede.engine.checkpoint.saving import Checkpoints
from stampede.engine.config.load import load_config
from stampede.engine.processes import processes
from stampede.engine.reading import data_folder, open_dataset
from stampede.engine.resume import begin, find_beginning
from stampede.engine.run_folder import RunFolder
from support.movie_runs import job, prepare_movies
from support.movies import MOVIES


def movie_folder(folder, rows=600, schema=MOVIES):
    """A folder for `train_on_movies`; other numbers of rows have other ids, mostly the same."""
    return prepare_movies(folder, rows=rows, schema=schema)


def begun(folder, overrides, name="begun"):
    """A run on movies up to its first step, saved as the checkpoint `name`.

    Returns:
        The checkpoint, what was told, and the report.
    """
    with processes("cpu") as here:
        return begun_in(here, folder, overrides, name)


def begun_one_after_another(cases, plans, world_size):
    """What `begun` gives for each case and plan; as a rank of several."""
    with processes("cpu") as here:
        return [
            begun_in(here, folder, [*overrides, f"sharding.plan={plan}"], f"{plan}-{world_size}")
            for plan in plans
            for folder, overrides in cases
        ]


def begun_in(here, folder, overrides, name):
    """The same in processes that are joined already."""
    folder = Path(folder)
    config = load_config(folder / "movies.yaml", [*job(folder), *overrides], here.world_size)
    run = RunFolder(folder / config.run.name)
    found = find_beginning(config, run, config.checkpoint.resume == "auto", here)
    dataset = open_dataset(config, here)
    trained = build(config, dataset, here)
    progress, lines, report = begin(found, config, trained, dataset, here)
    target = folder / name
    here.on_main(lambda: target.mkdir(exist_ok=True))
    with Checkpoints(target, trained, config, dataset, here) as checkpoints:
        checkpoints.save(progress)
    return newest(target), lines, report and asdict(report)


def rows_of_ids(folder):
    """By field of a run on movies: by text, the row of each id of a vocabulary."""
    config = load_config(folder / "movies.yaml", job(folder))
    data = data_folder(config)
    found = {}
    for entry in read_prepared(data).fields:
        path = data / "learned" / f"{entry.name}.parquet"
        if path.exists():
            texts = pl.read_parquet(path)["value"].to_list()
            found[entry.name] = {None: 0, "unseen": 1} | {t: i + 2 for i, t in enumerate(texts)}
    return found


def weights_name(field):
    return f"model.front.ebc.embedding_bags.t_{field}.weight"
