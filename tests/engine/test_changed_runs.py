"""A run whose data, network or optimizers were changed is not continued."""

import shutil

import pytest

from stampede.engine.checkpoint.retention import newest
from stampede.engine.config.load import load_config
from stampede.engine.errors import RunFolderError
from stampede.engine.run import run
from support.checkpoints import values_of
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


def swapped(data, copy):
    """The same prepared data, but two users have each other's row."""
    shutil.copytree(data, copy)
    swap_users(copy)
    sign_learned(copy)
    return copy


@pytest.mark.slow
def test_a_vocabulary_of_the_same_size_is_another_one(tmp_path):
    folder = movie_folder(tmp_path / "run")
    data = prepared(tmp_path / "one", "table", str(folder / "log.csv"),
                    schema=str(folder / "schema.yaml"))  # fmt: skip
    other = swapped(data, tmp_path / "other")
    same = shutil.copytree(data, tmp_path / "same")
    # Nothing of `job` that a prepared folder has no use for.
    settings = ["data.kind=prepared", "run.name=small", "evaluate.select_on=test"]
    config = folder / "small.yaml"
    config.write_text("")

    def train(path, *more):
        run(load_config(config, [f"run.dir={folder}", f"data.path={path}", *settings,
                                 "model.hidden=[8]", "train.batch_size=64", *more]))  # fmt: skip

    train(data)
    train(same, *RESUME)
    with pytest.raises(RunFolderError) as refusal:
        train(other, *RESUME)
    said = str(refusal.value)
    hashes = [values_of(newest_of(folder, "small"))["data"]["vocabulary_sha256"]]
    assert said.count("in the checkpoint") == 1 and f"'{hashes[0]}' in the checkpoint" in said
