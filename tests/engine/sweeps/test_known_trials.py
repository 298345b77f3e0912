"""Trials that are done: wherever they are, and when something of them is damaged."""

import csv
import json
import re
import shutil

import pytest

from stampede.engine.errors import RunFolderError, TrainingStoppedError
from stampede.engine.report.run_records import open_runs
from stampede.engine.sweeps import run
from stampede.engine.sweeps.run import run_sweep, shown
from stampede.engine.sweeps.sweep import load_sweep
from stampede.models.registry import _NETWORKS
from support.own_networks import NUMBERS_ONLY, own_network
from support.sweeping import Started, sweep, write_sweep

GRID = """
grid:
  $rate_{:
    _low: [optim.dense.lr=1e-4]
    too high: [optim.dense.lr=1e38, optim.dense.schedule.warmup=0]
overrides: [evaluate.select_on=test]
"""
LOW, HIGH = "low-seed1", "too-high-seed1"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A sweep of a trial that was done and one that failed."""
    folder = tmp_path_factory.mktemp("sweep")
    sweep(folder, GRID.replace("_low", "low"), Started())
    return folder


@pytest.fixture
def moved(finished, tmp_path, monkeypatch):
    """The sweep in another folder, the working one."""
    shutil.copytree(finished, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def again(folder, text=GRID, **options):
    """Run the sweep in `out`, a relative path; the sweep and the trials that were started."""
    start = Started()
    found = load_sweep(write_sweep(folder, text), folder=folder.relative_to(folder) / "out")
    files = run_sweep(found, start, **options)
    return found, start.names, files


def rows_of(folder):
    with (folder / "out/results.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_sweep_may_be_moved_and_its_folder_written_in_another_way(moved):
    found, started, files = again(moved)
    # Neither trial is taken for one of another configuration, also not the one that failed.
    assert started == []
    assert {file.name for file in files} == {"results.csv", "results.md", "auc.png", "seconds.png"}
    with pytest.raises(RunFolderError, match=r"optim.dense.lr is 0.0001 there and 0.0002 here"):
        again(moved, GRID.replace("1e-4", "2e-4"))
    said = shown(found, files)
    assert "stampede report out" in said
    assert {run.path.name for run in open_runs([moved / "out"])} >= {LOW}


def test_selection_on_the_test_part_is_said_everywhere(moved, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "stampede.engine.sweeps.pictures.to_png", lambda figure: drawn.append(figure) or b""
    )
    again(moved)
    (low, _) = rows_of(moved)
    lines = (moved / f"out/trials/{LOW}/metrics.jsonl").read_text().splitlines()
    (test,) = [one for one in map(json.loads, lines) if one["kind"] == "evaluation"]
    assert test["part"] == "test" and float(low["auc_mean"]) == test["auc"]
    assert low["selected_on"] == "test"
    text = (moved / "out/results.md").read_text()
    assert "Data: synthetic; 600 training rows, 200 test rows; selected on the test part." in text
    assert "optimistic" in text
    for figure in drawn:
        assert figure.get_suptitle() == "best epoch chosen on the test part"


def test_a_kill_before_the_end_was_noted_leaves_no_checkpoints(moved):
    checkpoints = moved / f"out/trials/{LOW}/checkpoints"
    assert checkpoints.exists()
    again(moved, GRID + "keep_checkpoints: false\n")
    assert not checkpoints.exists()


def test_trials_of_a_network_whose_file_has_changed_are_not_taken_for_its(tmp_path, monkeypatch):
    monkeypatch.setattr("stampede.models.registry._NETWORKS", dict(_NETWORKS))
    own = own_network(tmp_path, "numbers_only", NUMBERS_ONLY)
    text = f"grid: {{optim.dense.lr: [1e-4]}}\noverrides: {json.dumps(own)}\n"
    sweep(tmp_path, text, Started())
    (tmp_path / "own.py").write_text(NUMBERS_ONLY.replace("return self", "return -self"))
    start = Started()
    with pytest.raises(RunFolderError, match=r"own.py is not as it was when .* was trained"):
        sweep(tmp_path, text, start)
    assert start.names == []


def edit_summary(run, **values):
    path = run / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("retry_failed", [False, True])
def test_an_undefined_auc_is_a_failure_whenever_it_is_found(moved, retry_failed):
    edit_summary(moved / f"out/trials/{LOW}", auc=None)
    with pytest.raises(TrainingStoppedError, match="AUC of the test part is undefined"):
        again(moved, retry_failed=retry_failed)
    assert [row["failed"] for row in rows_of(moved)] == ["1", "1"]
    assert "`--retry-failed` runs them again" in (moved / "out/results.md").read_text()


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


RUN = f"trials/{LOW}"


@pytest.mark.parametrize(
    "damage, sentence",
    [
        (write("failures.json", "{"), r"failures\.json: is damaged .*; delete it"),
        (write("failures.json", "[]"), r"failures\.json: is damaged .*; delete it"),
        (write("failures.json", '{"a": {}}'), r"failures\.json: is damaged \(no 'message'\)"),
        (write(f"{RUN}/summary.json", "{"), rf"summary\.json: is damaged .*; delete \S*{LOW} to"),
        (write(f"{RUN}/summary.json", "{}"), r"summary\.json: is damaged \(no 'selected_on'\)"),
    ],
)
def test_what_is_damaged_gets_a_sentence(moved, damage, sentence):
    damage(moved / "out")
    with pytest.raises(RunFolderError, match=sentence):
        again(moved)


def test_an_error_of_a_trial_is_not_one_of_the_folder(moved, monkeypatch):
    (moved / "out/failures.json").unlink()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stampede.engine.sweeps.failures.write_file", full)
    with pytest.raises(RunFolderError, match=r"failures\.json: cannot be written \(No space left"):
        again(moved)


def test_pictures_that_fail_do_not_fail_the_sweep(moved, monkeypatch, capsys):
    def fail(*_):
        raise ValueError("Unknown symbol: \\x\nand more")

    monkeypatch.setattr(run, "draw", fail)
    _, _, files = again(moved)
    assert [file.name for file in files] == ["results.csv", "results.md"]
    said = capsys.readouterr().err
    assert re.search(r"no pictures, drawing failed: Unknown symbol: \\x$", said, flags=re.M)
