"""The bias that a run begins with."""

import math

import numpy as np
import pytest

from stampede.engine.checkpoint.retention import newest
from support.jobs import tensors_of
from support.movie_runs import ROWS, train_on_movies
from support.movies import movies
from support.warm_starts import begun, movie_folder

LOG_ODDS = ["model.initial_bias=log_odds"]


def bias_of(checkpoint):
    return tensors_of(checkpoint)["model.bias"].item()


def test_weights_count(tmp_path):
    path, told, _ = begun(movie_folder(tmp_path / "new"), LOG_ODDS)
    # The last tenth is the test part, the fifth before it the validation part.
    frame = movies(ROWS)[: round(ROWS * 0.9 * 0.8)]
    weight = frame["importance"].to_numpy().astype(np.float32).astype(np.float64)
    clicks = (frame["rating"] >= 4).to_numpy() @ weight
    expected = math.log(clicks / (weight.sum() - clicks))
    assert bias_of(path) == pytest.approx(expected, rel=1e-6)
    assert "log odds" in told[0]


@pytest.mark.slow
@pytest.mark.parametrize("clicked", [False, True])
def test_a_part_of_one_class_begins_with_zero(tmp_path, clicked):
    folder = movie_folder(tmp_path / "new")
    frame = movies(ROWS)
    frame["rating"] = 5 if clicked else 1
    frame.to_csv(folder / "log.csv", index=False)
    path, told, _ = begun(folder, LOG_ODDS)
    assert bias_of(path) == 0 and not told


@pytest.mark.slow
def test_a_run_that_goes_on_or_takes_weights_keeps_its_bias(tmp_path):
    trained = train_on_movies(movie_folder(tmp_path / "old"), *LOG_ODDS)
    saved = bias_of(newest(trained / "checkpoints"))
    new = movie_folder(tmp_path / "new", 900)
    path, _, _ = begun(new, [*LOG_ODDS, f"checkpoint.init_from={trained}"])
    assert bias_of(path) == saved
    # What a new run would begin with is no matter then.
    resumed = ["run.name=movies", "checkpoint.resume=auto", "model.initial_bias=zero"]
    path, told, _ = begun(trained.parent, resumed)
    assert bias_of(path) == saved and "initial_bias" not in "".join(told)
