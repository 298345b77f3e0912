"""A run that the tests of this folder share and do not change."""

import pytest

from support.movie_runs import prepare_movies, train_on_movies


@pytest.fixture(scope="package")
def trained_run(tmp_path_factory):
    folder = prepare_movies(tmp_path_factory.mktemp("movies"))
    # With this seed the best of the three epochs is the first, so that choosing it shows.
    return train_on_movies(folder, "train.epochs=3", "optim.dense.lr=0.02", "run.seed=4")
