"""Runs that begin with what others have learned, and what is then in their tables."""

from dataclasses import asdict

from stampede.engine.checkpoint.resume import begin, find_beginning
from stampede.engine.checkpoint.retention import newest
from stampede.engine.checkpoint.saving import Checkpoints
from stampede.engine.config.load import load_config
from stampede.engine.job.build import build
from stampede.engine.processes import processes
from stampede.engine.reading import open_dataset
from stampede.engine.results.run_folder import RunFolder
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


def begun_in(here, folder, overrides, name):
    """The same in processes that are joined already."""
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


def weights_name(field):
    return f"model.front.ebc.embedding_bags.t_{field}.weight"
