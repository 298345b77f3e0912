"""Predictions in this process, and what is in their files."""

import contextlib
import io

import polars as pl

from stampede.engine.inference.predict_command import main


def run_command(main, *arguments):
    """Exit status of a command, and what it said."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([*map(str, arguments)])
    return status, out.getvalue() + err.getvalue()


def predict(*arguments):
    """The same of stampede.engine.inference.predict_command."""
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
