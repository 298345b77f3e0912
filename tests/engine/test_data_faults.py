"""Data and folders that are not what they were: each gets a sentence, or training goes on."""

import json
import shutil

import numpy as np
import pytest

from stampede.data import DataError
from stampede.data.residence import Readahead
from stampede.engine.config.load import load_config
from stampede.engine.run import run
from stampede.settings import SettingsError
from support.jobs import lines
from support.movie_runs import prepared_movies
from support.permissions import read_only
from support.preparing import IDS, NUMBERS
from support.reading import OVERRIDES, prepared


def train(folder, data, *overrides):
    """A run on prepared data, as the launcher does it."""
    path = folder / "small.yaml"
    path.write_text("")
    given = ["data.kind=prepared", f"data.path={data}", f"run.dir={folder}/runs", *OVERRIDES]
    run(load_config(path, [*given, *overrides]))
    return folder / "runs/small"


def numbers_of(run_folder):
    """What was logged, without what depends on the clock."""
    timed = ("seconds", "per_second", "time", "bytes")
    return [
        {key: value for key, value in line.items() if not key.endswith(timed)}
        for line in lines(run_folder)
    ]


def test_data_that_vanish_during_training_are_still_there_for_this_run(tmp_path, monkeypatch):
    """Memory-mapped files keep their content; the next run is told which file is absent."""
    data = prepared(tmp_path / "data", train=1000)
    from_disk = ["data.residence=disk", "data.shuffle=block", "data.memory_gb=1e-5",
                 "train.epochs=2"]  # fmt: skip
    undisturbed = numbers_of(train(tmp_path, data, *from_disk, "run.name=small"))
    calls, read_ahead = [], Readahead.__call__

    def deleting(self, epoch, position):
        calls.append(epoch)
        if len(calls) == 3:
            shutil.rmtree(data)
        read_ahead(self, epoch, position)

    monkeypatch.setattr(Readahead, "__call__", deleting)
    found = numbers_of(train(tmp_path, data, *from_disk, "run.overwrite=true"))
    assert found == undisturbed and not data.exists() and max(calls) == 1
    with pytest.raises(DataError, match=r"data: no prepared data here"):
        train(tmp_path, data, *from_disk, "train.epochs=3", "checkpoint.resume=auto")


def test_one_file_that_vanished_between_runs(tmp_path):
    data = prepared(tmp_path / "data")
    train(tmp_path, data)
    (data / "train-0-ids.npy").unlink()
    with pytest.raises(DataError, match=r"train-0-ids.npy: No such file"):
        train(tmp_path, data, "checkpoint.resume=auto", "train.epochs=2")
    assert json.loads((tmp_path / "runs/small/summary.json").read_text())["epochs"] == 1


@pytest.fixture
def log(tmp_path):
    """A log of Criteo's columns."""
    draw = np.random.default_rng(0)
    rows = [
        [i % 2, *draw.integers(0, 9, len(NUMBERS)), *(f"v{v}" for v in draw.integers(0, 5, 26))]
        for i in range(200)
    ]
    path = tmp_path / "log.txt"
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    assert len(rows[0]) == 1 + len(NUMBERS) + len(IDS)
    return path


def train_log(folder, log, *overrides):
    (folder / "log.yaml").write_text("")
    given = ["data.kind=criteo_kaggle", f"data.path={log}", f"data.cache={folder}/cache",
             f"run.dir={folder}/runs", *OVERRIDES, *overrides]  # fmt: skip
    run(load_config(folder / "log.yaml", given))


def test_a_read_only_cache(tmp_path, log):
    cache = tmp_path / "cache"
    cache.mkdir()
    with read_only(cache), pytest.raises(
        DataError, match=r"cache/.*cannot be written \(Permission denied\); choose another folder"
    ):  # fmt: skip
        train_log(tmp_path, log)
    assert list(cache.iterdir()) == [] and not (tmp_path / "runs/small").exists()


def test_prepared_data_in_a_read_only_cache_are_used(tmp_path, log):
    train_log(tmp_path, log)
    shutil.rmtree(tmp_path / "runs")
    with read_only(tmp_path / "cache"):
        train_log(tmp_path, log)
    assert (tmp_path / "runs/small/summary.json").exists()


def test_a_vocabulary_that_vanished(tmp_path):
    train(tmp_path, prepared_movies(tmp_path))
    (tmp_path / "data/learned/user.parquet").unlink()
    with pytest.raises(DataError, match=r"learned.json: damaged .*No such file.*parquet.*delete"):
        train(tmp_path, tmp_path / "data", "checkpoint.resume=auto", "train.epochs=2")
    shutil.rmtree(tmp_path / "data/learned")
    with pytest.raises(DataError, match=r"learned.json: damaged .*; delete the folder to prepare"):
        train(tmp_path, tmp_path / "data", "run.name=other")


@pytest.fixture
def raw_log(tmp_path):
    """A log of 200 rows, its schema, and the keys of a run on it."""
    rows = [f"{i % 2},u{i % 7},{i % 3},{'a|b' if i % 5 else ''}" for i in range(200)]
    (tmp_path / "log.csv").write_text("\n".join(["y,user,shop,tags", *rows]) + "\n")
    (tmp_path / "schema.yaml").write_text(
        "label: y\nids: {user: {}, shop: {}, tags: {separator: '|'}}\n"
    )
    paths = {"path": "log.csv", "schema_file": "schema.yaml", "cache": "cache/of/mine"}
    keys = [f"data.{key}={tmp_path / name}" for key, name in paths.items()]
    return tmp_path, ["data.kind=table", *keys, f"run.dir={tmp_path}/runs", *OVERRIDES]


@pytest.mark.parametrize(
    "override, words",
    [
        (
            "evaluate.group_by=usr",
            r"evaluate.group_by: 'usr' is not an id field; write one of user",
        ),
        ("evaluate.group_by=tags", r"evaluate.group_by: 'tags' is a field of several ids"),
        ("data.path=empty.csv", r"empty.csv: is empty"),
        ("data.path=bad.csv", r"found 'yes'.*\(or data.on_bad_row=skip to leave such rows out\)"),
    ],
)
def test_a_refused_run_leaves_nothing_and_prepares_nothing(raw_log, override, words, monkeypatch):
    folder, given = raw_log
    monkeypatch.chdir(folder)
    (folder / "empty.csv").write_text("")
    (folder / "bad.csv").write_text((folder / "log.csv").read_text().replace("\n1,", "\nyes,"))
    (folder / "small.yaml").write_text("")
    before = sorted(folder.rglob("*"))
    if override.startswith("evaluate"):
        monkeypatch.setattr("stampede.engine.reading.prepare", lambda *_: pytest.fail("prepared"))
    with pytest.raises((DataError, SettingsError), match=words):
        run(load_config(folder / "small.yaml", [*given, override]))
    assert sorted(folder.rglob("*")) == before
    if override.startswith("evaluate"):
        return
    run(load_config(folder / "small.yaml", given))
    # The lock is gone after a run that ended, too.
    assert [path.name for path in (folder / "runs").iterdir()] == ["small"]
