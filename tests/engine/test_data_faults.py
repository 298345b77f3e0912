"""Data and folders that are not what they were: each gets a sentence, or training goes on."""

import json
import shutil

import pytest

from stampede.data import DataError
from stampede.data.residence import Readahead
from stampede.engine.config.load import load_config
from stampede.engine.errors import RunFolderError
from stampede.engine.results.run_folder import RunFolder
from stampede.engine.run import run
from stampede.settings import SettingsError
from support.jobs import run_small, without_times
from support.movie_runs import prepared_movies
from support.permissions import read_only
from support.reading import OVERRIDES, prepared, run_prepared


@pytest.mark.slow
def test_data_that_vanish_during_training_are_still_there_for_this_run(tmp_path, monkeypatch):
    """Memory-mapped files keep their content; the next run is told which file is absent."""
    data = prepared(tmp_path / "data", train=1000)
    from_disk = ["data.residence=disk", "data.shuffle=block", "data.memory_gb=1e-5",
                 "train.epochs=2"]  # fmt: skip
    run_prepared(tmp_path, data, from_disk)
    undisturbed = without_times(tmp_path / "small")
    calls, read_ahead = [], Readahead.__call__

    def deleting(self, epoch, position):
        calls.append(epoch)
        if len(calls) == 3:
            shutil.rmtree(data)
        read_ahead(self, epoch, position)

    monkeypatch.setattr(Readahead, "__call__", deleting)
    run_prepared(tmp_path, data, [*from_disk, "run.overwrite=true"])
    assert without_times(tmp_path / "small") == undisturbed
    assert not data.exists() and max(calls) == 1
    with pytest.raises(DataError, match=r"data: no prepared data here"):
        run_prepared(tmp_path, data, [*from_disk, "train.epochs=3", "checkpoint.resume=auto"])


def test_files_that_vanished_between_runs(tmp_path):
    data = prepared_movies(tmp_path)
    run_prepared(tmp_path, data, [])
    (data / "train-00000-ids.npy").rename(data / "elsewhere")
    with pytest.raises(DataError, match=r"train-00000-ids.npy: No such file"):
        run_prepared(tmp_path, data, ["checkpoint.resume=auto", "train.epochs=2"])
    assert json.loads((tmp_path / "small/summary.json").read_text())["epochs"] == 1
    (data / "elsewhere").rename(data / "train-00000-ids.npy")
    (data / "learned/user.parquet").unlink()
    with pytest.raises(DataError, match=r"learned.json: damaged .user.parquet: No such.*delete"):
        run_prepared(tmp_path, data, ["checkpoint.resume=auto", "train.epochs=2"])
    shutil.rmtree(data / "learned")
    with pytest.raises(DataError, match=r"learned.json: damaged .*; delete the folder to prepare"):
        run_prepared(tmp_path, data, ["run.name=other"])


@pytest.fixture
def raw_log(tmp_path):
    """A folder with a log of 200 rows and its schema, and a function that trains on it."""
    rows = [f"{i % 2},u{i % 7},{i % 3},{'a|b' if i % 5 else ''}" for i in range(200)]
    (tmp_path / "log.csv").write_text("\n".join(["y,user,shop,tags", *rows]) + "\n")
    (tmp_path / "schema.yaml").write_text(
        "label: y\nids: {user: {}, shop: {}, tags: {separator: '|'}}\n"
    )
    (tmp_path / "small.yaml").write_text("")
    paths = {"path": "log.csv", "schema_file": "schema.yaml", "cache": "cache/of/mine"}
    keys = [f"data.{key}={tmp_path / name}" for key, name in paths.items()]
    given = ["data.kind=table", *keys, f"run.dir={tmp_path}/runs", *OVERRIDES]

    def train(*overrides):
        run(load_config(tmp_path / "small.yaml", [*given, *overrides]))

    return tmp_path, train


def test_a_read_only_cache_is_used_but_not_filled(raw_log):
    folder, train = raw_log
    cache = folder / "cache/of/mine"
    cache.mkdir(parents=True)
    with read_only(cache), pytest.raises(
        DataError, match=r"mine/.*cannot be written \(Permission denied\); choose another folder"
    ):  # fmt: skip
        train()
    assert list(cache.iterdir()) == [] and not (folder / "runs/small").exists()
    train()
    with read_only(cache):
        train("run.overwrite=true")


@pytest.mark.parametrize(
    "override, words",
    [
        ("evaluate.group_by=tags", r"evaluate.group_by: 'tags' is a field of several ids"),
        ("data.path=empty.csv", r"empty.csv: is empty"),
        ("data.path=bad.csv", r"found 'maybe'.*\(or data.on_bad_row=skip to leave such rows out\)"),
    ],
)
def test_a_refused_run_leaves_nothing_and_prepares_nothing(raw_log, override, words, monkeypatch):
    folder, train = raw_log
    monkeypatch.chdir(folder)
    (folder / "empty.csv").write_text("")
    (folder / "bad.csv").write_text((folder / "log.csv").read_text().replace("\n1,", "\nmaybe,"))
    before = sorted(folder.rglob("*"))
    if override.startswith("evaluate"):
        monkeypatch.setattr("stampede.engine.reading.prepare", lambda *_: pytest.fail("prepared"))
    with pytest.raises((DataError, SettingsError), match=words):
        train(override)
    assert sorted(folder.rglob("*")) == before


SAVED = ["checkpoint.every_steps=3"]


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_lost_begins_anew_unless_it_has_ended(tmp_path, capsys):
    run_small(tmp_path, SAVED)
    run = tmp_path / "small"
    # The lock is gone with its run.
    assert {path.name for path in tmp_path.iterdir()} == {"small", "small.yaml"}
    whole = without_times(run)
    shutil.rmtree(run / "checkpoints")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(RunFolderError, match=r"that has ended, and no checkpoint .*overwrite=true"):
        run_small(tmp_path, [*SAVED, "checkpoint.resume=auto", "train.epochs=2"])
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    (run / "summary.json").unlink()
    assert "starts from scratch" not in capsys.readouterr().out
    run_small(tmp_path, [*SAVED, "checkpoint.resume=auto"])
    said = capsys.readouterr().out
    assert f"the run starts from scratch; {len(whole)} lines of metrics.jsonl are dropped" in said
    assert without_times(run) == whole


def test_missing_lines_of_a_continued_run_are_told(tmp_path, capsys):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"kind": "train"}\n{"kind')
    folder.keep_lines(3)
    assert "metrics.jsonl: 2 lines of earlier steps are missing" in capsys.readouterr().out
    assert folder.metrics_lines == 1
