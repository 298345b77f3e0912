"""What an export and a package refuse."""

import pytest
from safetensors import SafetensorError

from stampede.engine import export as command
from stampede.engine.inference import packaging
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
    assert status == 2 and "is there already; write --overwrite" in said
    assert (out / "package.json").read_bytes() == before
    assert export(trained_run, out, "--overwrite")[0] == 0
    assert loaded(out).about["rows"] == "fp32"
    (tmp_path / "thesis").mkdir()
    status, said = export(trained_run, tmp_path / "thesis", "--overwrite")
    assert status == 2 and "is no exported package" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["package", "thesis"]


def test_a_full_disk_leaves_nothing(trained_run, tmp_path, monkeypatch):
    def full(*_):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(packaging, "save_file", full)
    status, said = export(trained_run, tmp_path / "package")
    assert status == 2 and "No space left on device" in said and "free some space" in said
    assert list(tmp_path.iterdir()) == []


def test_runs_that_cannot_be_used(trained_run, tmp_path):
    status, said = export(tmp_path / "nowhere", tmp_path / "package")
    assert status == 2 and "there is no such run folder or checkpoint" in said
    status, said = export(trained_run, tmp_path / "package", "--epoch", "9")
    assert status == 2 and "no whole checkpoint of epoch 9" in said


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
        ({"user": [["1", "2"]]}, "column user: found lists; write one id per sample"),
        ({"city": ["Oslo", "Paris"]}, "columns of different lengths"),
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


def test_everything_may_be_missing_but_the_time(packages):
    missing = {name: [None, None] for name in GOOD} | {"when": GOOD["when"] * 2}
    first, second = loaded(packages / "fp32").score(missing)
    assert first == second


def test_the_help_fits(capsys):
    assert max(map(len, command._parser().format_help().splitlines())) <= 100
