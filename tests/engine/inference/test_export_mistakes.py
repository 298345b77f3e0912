"""What an export and a package refuse."""

import errno
import json
import resource
import shutil
from contextlib import contextmanager

import pytest
import torch

from stampede.engine import export as command
from stampede.engine.inference import packaging
from stampede.engine.inference.trained import open_trained
from support.packages import loaded
from support.predicting import run_command

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


@contextmanager
def no_file_beyond(size):
    """The system writes no file of more bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_a_full_disk_leaves_nothing(trained_run, packages, tmp_path):
    files = [path for path in (packages / "fp32").rglob("*.*") if path.suffix != ".pyc"]
    sizes = {path.name: path.stat().st_size for path in files}
    # Not enough for the largest, or for the loader, of which stampede's own files are the source.
    for size in (max(sizes.values()) - 1, sizes["encode.py"] - 1, sizes["dense.json"] - 1):
        with no_file_beyond(size):
            status, said = export(trained_run, tmp_path / "package")
        assert status == 2 and f"{tmp_path}/package: cannot be written (File too large)" in said
        assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_for_tables_and_vocabularies_alone(trained_run, tmp_path):
    trained = open_trained(trained_run)
    about = {"fields": [{"name": "user"}]}
    with no_file_beyond(100):
        with pytest.raises(OSError, match="File too large") as raised:
            packaging.save_tensors({"x": torch.zeros(99)}, tmp_path / "x.safetensors")
        assert raised.value.errno == errno.EFBIG
        with pytest.raises(OSError, match="File too large") as raised:
            packaging._write_vocabularies(tmp_path / "vocabularies", trained_run / "inputs")
        assert raised.value.errno == errno.EFBIG
        with pytest.raises(OSError, match="File too large") as raised:
            packaging._write_tables(tmp_path / "tables", trained, "fp32", about)
        assert raised.value.errno == errno.EFBIG


def test_a_disk_that_is_full_for_a_file_of_onnx(trained_run, tmp_path):
    with no_file_beyond(5000):
        status, said = export(trained_run, tmp_path / "model.onnx", "--format", "onnx")
    assert status == 2 and f"{tmp_path}/model.onnx: cannot be written (File too large)" in said
    assert list(tmp_path.iterdir()) == []


def test_a_vocabulary_that_is_damaged(trained_run, tmp_path):
    run = shutil.copytree(trained_run, tmp_path / "run")
    for path in (run / "inputs/learned").glob("*.parquet"):
        path.write_bytes(b"PAR1")
    status, said = export(run, tmp_path / "package")
    assert status == 2 and "inputs/learned/" in said and "damaged" in said
    assert f"delete {run}/inputs to use the run's prepared data" in said
    assert not (tmp_path / "package").exists()


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


@pytest.mark.parametrize("length", [250, 256])
def test_a_name_that_is_too_long(trained_run, tmp_path, length):
    status, said = export(trained_run, tmp_path / ("x" * length))
    assert status == 2 and "cannot be written (File name too long)" in said
    status, said = export(tmp_path / ("x" * length), tmp_path / "package")
    assert status == 2 and "no such run folder" in said


@pytest.mark.parametrize("data", [{}, [], {"numbers": 1}])
def test_a_checkpoint_that_does_not_say_its_data(trained_run, tmp_path, data):
    run = shutil.copytree(trained_run, tmp_path / "run")
    manifest = run / "checkpoints/epoch_0001/manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "data": data}))
    status, said = export(run, tmp_path / "package")
    assert status == 2 and "epoch_0001: damaged checkpoint" in said and "delete it" in said


def test_runs_that_cannot_be_used(trained_run, tmp_path):
    status, said = export(tmp_path / "nowhere", tmp_path / "package")
    assert status == 2 and "no such run folder or checkpoint" in said
    status, said = export(trained_run, tmp_path / "package", "--epoch", "9")
    assert status == 2 and "no complete checkpoint of epoch 9" in said


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
        ({"user": [1e300]}, "column user: found 1e+300; write an id as text"),
        ({"genres": [[1.5]]}, "column genres: found 1.5; write an id as text"),
        ({"city": [7.0]}, "column city: found 7.0; write ids as text, as they are in the log"),
        ({"user": ["a", 1.5]}, "column user: found 1.5; write an id as text"),
        ({"genres": ["war", ["drama"]]}, "column genres: found lists and single values"),
        ({"user": "68fd1e64"}, "column user: found '68fd1e64'; write a list"),
        ({"user": [object]}, "write text, numbers or lists"),
    ],
)
def test_values_that_cannot_be_used(packages, changes, words):
    model = loaded(packages / "fp32")
    assert model.score(GOOD).shape == (1,)
    with pytest.raises(ValueError) as raised:
        model.score({**GOOD, **changes})
    assert words in str(raised.value)


def test_an_absent_column_is_named(packages):
    model = loaded(packages / "fp32")
    samples = {name: values for name, values in GOOD.items() if name != "movie"}
    for given in (samples, [{name: values[0] for name, values in samples.items()}]):
        with pytest.raises(ValueError, match="no column 'movie'; the model needs user, movie"):
            model.score(given)


def test_samples_that_are_none(packages):
    model = loaded(packages / "fp32")
    with pytest.raises(
        ValueError, match=r"found the sample \['1'\]; write each sample as a mapping"
    ):
        model.score([["1"]])
    with pytest.raises(ValueError, match="batch_size: found 0; write a number of at least 1"):
        model.score(GOOD, batch_size=0)


def rows_of_tables(model):
    """Ids, lengths and numbers of two samples, which `score_rows` takes."""
    ids = {name: [1, 2] for name in model.fields} | {"genres": [1, 2, 3]}
    return {"ids": ids, "lengths": {"genres": [2, 1]}, "numbers": [[0.5], [0.25]]}


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("genres", [1, 1], "lengths of genres: their sum is 2, but there are 3 ids"),
        ("genres", [4, -1], "lengths of genres: found -1; write 0 or more"),
        ("genres", [2.0, 1.0], "lengths of genres: found [2] float64; write whole numbers, [n]"),
        ("town", [2, 1], "lengths of 'town'; the fields are user"),
        ("numbers", [[float("nan")], [0]], "numbers: found nan; write finite numbers"),
        ("numbers", [[1e39], [0]], "numbers: found inf; write finite numbers"),
        ("numbers", [0.5, 0.25], "numbers: found the shape [2]; write [n, numbers]"),
        ("numbers", [["old"], [0]], "could not convert string to float: 'old'"),
        ("numbers", [[None], [object]], "numbers: "),
        ("user", [1.0, 2.0], "field user: found [2] float64; write whole numbers, [n]"),
        ("user", [[1, 2]], "field user: found [1, 2] int64; write whole numbers, [n]"),
        ("user", [True, False], "field user: found [2] bool; write whole numbers"),
        ("batch_size", -1, "batch_size: found -1; write a number of at least 1"),
    ],
)
def test_rows_of_tables_that_cannot_be_used(packages, name, value, words):
    model = loaded(packages / "fp32")
    given = rows_of_tables(model)
    assert model.score_rows(**given).shape == (2,)
    if name in ("numbers", "batch_size"):
        given[name] = value
    else:
        given["lengths" if name in ("genres", "town") else "ids"][name] = value
    with pytest.raises(ValueError) as raised:
        model.score_rows(**given)
    assert words in str(raised.value)


def test_everything_may_be_missing_but_the_time(packages):
    missing = {name: [None, None] for name in GOOD} | {"when": GOOD["when"] * 2}
    first, second = loaded(packages / "fp32").score(missing)
    assert first == second


def test_the_help_fits(capsys):
    assert max(map(len, command._parser().format_help().splitlines())) <= 100
