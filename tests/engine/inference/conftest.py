"""A run and its packages, which the tests of this folder share and do not change."""

import pytest

from stampede.engine.inference.packaging import export
from stampede.engine.inference.trained import open_trained
from support.movie_runs import prepare_movies, train_on_movies


@pytest.fixture(scope="package")
def trained_run(tmp_path_factory):
    folder = prepare_movies(tmp_path_factory.mktemp("movies"))
    # With this seed the best of the three epochs is the first, so that choosing it shows.
    return train_on_movies(folder, "train.epochs=3", "optim.dense.lr=0.02", "run.seed=4")


@pytest.fixture(scope="package")
def packages(trained_run, tmp_path_factory):
    """The folder of the run's package by type of rows."""
    folder = tmp_path_factory.mktemp("packages")
    for kind in ("fp32", "fp16", "int8"):
        export(open_trained(trained_run), folder / kind, kind, overwrite=False)
    return folder
