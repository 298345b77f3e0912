"""What an export and a package refuse."""

import re
from contextlib import ExitStack

import polars as pl
import pytest

from stampede.engine import export as command
from stampede.engine.inference import packaging
from support.full_disk import files_of_at_most
from support.packages import loaded
from support.predicting import refused, run_command

GOOD = {
    "user": ["1"], "movie": ["2"], "genres": ["war"], "city": ["Oslo"], "slot": [3], "age": [30],
    "when": ["2024-03-01 12:00:00"],
}  # fmt: skip


def export(*arguments):
    return run_command(command.main, *arguments)


def test_an_existing_folder_is_replaced_only_where_it_is_a_package(trained_run, tmp_path):
    out = tmp_path / "package"
    status, said = export(trained_run, out, "--rows", "int8")
    assert status == 0 and "7 tables in int8" in said and "load.py" in said
    before = (out / "package.json").read_bytes()
    status, said = export(trained_run, out)
    assert status == 2 and "already exists; write --overwrite" in said
    assert (out / "package.json").read_bytes() == before
    assert export(trained_run, out, "--overwrite")[0] == 0
    assert loaded(out).about["rows"] == "fp32"
    (tmp_path / "thesis").mkdir()
    status, said = export(trained_run, tmp_path / "thesis", "--overwrite")
    assert status == 2 and "is not an exported package" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["package", "thesis"]
    said = refused(command.main, tmp_path, trained_run, tmp_path / ("long" * 100))
    assert "longlong: cannot be written (File name too long)" in said


def full(tmp_path, run, name, *options):
    """The command finds no room and leaves nothing."""
    said = refused(command.main, tmp_path, run, tmp_path / name, *options)
    assert f"{tmp_path}/{name}: cannot be written (" in said and "File too large" in said


def test_a_full_disk_leaves_nothing(trained_run, tmp_path):
    with files_of_at_most(5000):
        full(tmp_path, trained_run, "package")
        full(tmp_path, trained_run, "model.onnx", "--format", "onnx")


@pytest.mark.parametrize(
    "owner, name", [(pl.DataFrame, "write_parquet"), (packaging, "read_stored_field")]
)
def test_a_disk_that_becomes_full(trained_run, tmp_path, monkeypatch, owner, name):
    """Libraries in Rust write the vocabularies and tables, with errors of their own."""
    function = getattr(owner, name)
    with ExitStack() as stack:

        def fill_up(*arguments):
            stack.enter_context(files_of_at_most(100))
            return function(*arguments)

        monkeypatch.setattr(owner, name, fill_up)
        full(tmp_path, trained_run, "package")


@pytest.mark.slow
def test_the_working_folder_is_replaced(trained_run, tmp_path, monkeypatch):
    assert export(trained_run, tmp_path / "package")[0] == 0
    (tmp_path / "link").symlink_to("package")
    for folder in ("package", "link"):
        monkeypatch.chdir(tmp_path / folder)
        status, said = export(trained_run, ".", "--overwrite", "--rows", "int8")
        assert status == 0 and f"{tmp_path}/package" in said
    assert export(trained_run, tmp_path / "link", "--overwrite", "--rows", "fp16")[0] == 0
    assert loaded(tmp_path / "package").about["rows"] == "fp16"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "package"]


def test_files_are_readable_by_others(packages):
    modes = {path.stat().st_mode & 0o777 for path in (packages / "fp32/tables").iterdir()}
    assert modes == {(packages / "fp32/package.json").stat().st_mode & 0o777}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"slot": [12]}, "column slot: found '12'; write whole numbers from 0 to 11"),
        ({"slot": ["a"]}, "column slot: found 'a'; write whole numbers"),
        ({"age": ["old"]}, "column age: found 'old'; write a finite number"),
        ({"age": [float("inf")]}, "column age: found inf; write a finite number"),
        ({"when": ["yesterday"]}, "column when: found 'yesterday'; write a time as %Y-%m-%d"),
        ({"when": [None]}, '%H:%M:%S (or on_bad_value="missing" to treat it as missing)'),
        ({"user": [["1", "2"]]}, "column user: found lists; write one id per sample"),
        ({"city": ["Oslo", "Paris"]}, "columns of different lengths"),
        ({"user": [1.5]}, "column user: found 1.5; write an id as text or as a whole number"),
        ({"genres": [[1.5]]}, "column genres: found 1.5; write an id as text"),
        ({"city": [7.0]}, "column city: found 7.0; write ids as text, as they are in the log"),
        ({"genres": ["war", ["drama"]]}, "column genres: found lists and single values"),
        ({"user": "68fd1e64"}, "column user: found '68fd1e64'; write a list"),
        ({"user": [object]}, "write text, numbers or lists"),
    ],
)
def test_values_that_cannot_be_used(packages, changes, words):
    model = loaded(packages / "fp32")
    assert model.score(GOOD).shape == (1,)
    with pytest.raises(ValueError, match=re.escape(words)):
        model.score({**GOOD, **changes})


def test_samples_that_are_no_mappings(packages):
    model = loaded(packages / "fp32")
    words = r"found the sample \['1'\]; write each sample as a mapping"
    with pytest.raises(ValueError, match=words):
        model.score([["1"]])
    with pytest.raises(ValueError, match="batch_size: found 0; write a number of at least 1"):
        model.score(GOOD, batch_size=0)


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("genres", [1, 1], "lengths of genres: their sum is 2, but there are 3 ids"),
        ("genres", [2.0, 1.0], "lengths of genres: found [2] float64; write whole numbers, [n]"),
        ("numbers", [[float("nan")], [0]], "numbers: write finite numbers, transformed, [n, 1]"),
        ("numbers", [0.5, 0.25], "numbers: write finite numbers, transformed, [n, 1]"),
        ("numbers", [[0.5]], "found [1, 2] samples; write equal numbers"),
        ("user", [1.0, 2.0], "user: found [2] float64; write whole numbers, [n]"),
        ("user", [1, 10**6], "field user: an id is not a row from 0 to"),
        ("user", None, "no ids of 'user'; the fields are user, movie"),
    ],
)
def test_rows_of_tables_that_cannot_be_used(packages, name, value, words):
    model = loaded(packages / "fp32")
    ids = {name: [1, 2] for name in model.fields} | {"genres": [1, 2, 3]}
    given = {"ids": ids, "lengths": {"genres": [2, 1]}, "numbers": [[0.5], [0.25]]}
    assert model.score_rows(**given).shape == (2,)
    if name == "numbers":
        given[name] = value
    elif value is None:
        del ids[name]
    else:
        given["lengths" if name == "genres" else "ids"][name] = value
    with pytest.raises(ValueError, match=re.escape(words)):
        model.score_rows(**given)
