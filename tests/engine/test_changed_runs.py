"""A run whose data, network or optimizers were changed is not continued."""

import pytest

from stampede.engine.checkpoint.retention import newest
from stampede.engine.errors import RunFolderError
from support.movie_runs import train_on_movies
from support.movies import MOVIES
from support.warm_starts import movie_folder

RESUME = ["checkpoint.resume=auto", "train.epochs=2"]


@pytest.fixture
def folder(tmp_path):
    """A run `movies`, trained for an epoch."""
    train_on_movies(movie_folder(tmp_path / "run"))
    return tmp_path / "run"


def newest_of(folder, run="movies"):
    return newest(folder / run / "checkpoints")


@pytest.mark.slow
def test_another_vocabulary(folder):
    """The same rows, but ids that are seen once have a row now."""
    movie_folder(folder, schema=MOVIES.replace("min_count: 2", "min_count: 1"))
    saved = newest_of(folder)
    said = (
        r"(?s)on other data.*_sha256: '\w+' in .*sizes.user: \d+ in the checkpoint, \d+ now"
        r".*start a new run with its weights: write another run.name, and "
        rf"checkpoint.init_from={saved}"
    )
    with pytest.raises(RunFolderError, match=said):
        train_on_movies(folder, *RESUME)
    # And so it is begun.
    train_on_movies(folder, f"checkpoint.init_from={saved}", "run.name=new")
