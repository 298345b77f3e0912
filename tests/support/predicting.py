"""Predictions in this process, and what is in their files."""

import contextlib
import io
from pathlib import Path

import polars as pl
from sklearn.metrics import roc_auc_score

from stampede.engine.predict import main
from support.movie_runs import train_on_movies


def run_command(main, *arguments):
    """Exit status of a command, and what it said."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([*map(str, arguments)])
    return status, out.getvalue() + err.getvalue()


def predict(*arguments):
    """The same of stampede.engine.predict."""
    return run_command(main, *arguments)


def refused(main, folder, *arguments):
    """What a command says that refuses its arguments and leaves the folder as it was."""
    before = contents(folder)
    status, said = run_command(main, *arguments)
    assert status == 2 and [line[:7] for line in said.splitlines()].count("error: ") == 1, said
    assert contents(folder) == before
    return said


def contents(folder):
    """The names in a folder, and the content of its files."""
    return {path: path.is_file() and path.read_bytes() for path in folder.iterdir()}


def scores(run, inputs, folder, *options):
    """The scores of some inputs."""
    output = folder / "scores.parquet"
    status, said = predict(run, *inputs, output, "--overwrite", *options)
    assert status == 0, said
    return pl.read_parquet(output)


def auc_of(frame):
    """Weighted, by scikit-learn."""
    return roc_auc_score(frame["label"], frame["score"], sample_weight=frame["weight"])


def train_as_ranks(folder: str, plan: str, world_size: int) -> None:
    """A run as a rank of several."""
    train_on_movies(Path(folder), f"sharding.plan={plan}", world_size=world_size)
