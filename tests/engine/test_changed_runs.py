"""A run whose data, network or optimizers were changed is not continued."""

import shutil

import pytest

from stampede.engine.checkpoint.retention import newest
from stampede.engine.config.load import load_config
from stampede.engine.errors import RunFolderError
from stampede.engine.run import run
from support.movie_runs import train_on_movies
from support.movies import MOVIES
from support.preparing import prepared
from support.tampering import sign_learned, swap_users
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


@pytest.mark.slow
def test_a_vocabulary_of_the_same_size_is_another_one(tmp_path):
    folder = movie_folder(tmp_path / "run")
    data = prepared(tmp_path / "one", "table", str(folder / "log.csv"),
                    schema=str(folder / "schema.yaml"))  # fmt: skip
    other = shutil.copytree(data, tmp_path / "other")
    # Two users have each other's row.
    swap_users(other)
    sign_learned(other)
    config = folder / "small.yaml"
    config.write_text("")

    def train(path, *more):
        run(load_config(config, [f"run.dir={folder}", "data.kind=prepared", f"data.path={path}",
                                 "evaluate.select_on=test", "model.hidden=[8]",
                                 "train.batch_size=64", *more]))  # fmt: skip

    train(data)
    train(shutil.copytree(data, tmp_path / "same"), *RESUME)
    with pytest.raises(RunFolderError, match=r"vocabulary_sha256: '\w+' in the checkpoint"):
        train(other, *RESUME)
