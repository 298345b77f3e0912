"""Data and folders that are not what they were: each gets a sentence, or training goes on."""

import json
import os
import shutil

import numpy as np
import pytest

from stampede.data import DataError
from stampede.data.prepared import verify as verifying
from stampede.data.residence import Readahead
from stampede.engine.checkpoint.retention import newest
from stampede.engine.config.load import load_config
from stampede.engine.errors import RunFolderError
from stampede.engine.run import run
from stampede.engine.run_folder import RunFolder
from stampede.settings import SettingsError
from support.jobs import run_small, without_times
from support.movie_runs import prepared_movies, train_on_movies
from support.movies import MOVIES
from support.permissions import read_only
from support.ranks import run_ranks
from support.reading import OVERRIDES, prepared, refusal_of, run_prepared
from support.tampering import sign_learned, swap_users
from support.warm_starts import movie_folder

READING = "not verified here yet; reading them"
RESUME = ["checkpoint.resume=auto", "train.epochs=2"]


def change_a_value(path):
    """Another value in an array; the file is as long as before."""
    array = np.load(path)
    array[0] = 1 - array[0]
    np.save(path, array)


@pytest.mark.parametrize("keeps_time", [False, True])
def test_a_changed_shard_is_refused_before_training(tmp_path, keeps_time):
    data = prepared(tmp_path / "data")
    path = data / "test-0-label.npy"
    before = path.stat()
    change_a_value(path)
    if keeps_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataError) as refusal:
        run_prepared(tmp_path, data, [])
    assert str(refusal.value).startswith(f"{path}: its content has changed (SHA-256 differs)")
    assert f"--verify {data}" in str(refusal.value)
    assert not (tmp_path / "small").exists()


def test_what_is_verified_is_recorded(tmp_path, monkeypatch):
    data = shutil.copytree(prepared(tmp_path / "data"), tmp_path / "copy")
    verifying.verify(data)
    said = []
    monkeypatch.setattr(verifying, "check_files", lambda folder, entries: said.extend(entries))
    verifying.check_unchanged(data, said.append)
    assert said == []
    # A manifest with other checksums: nobody has compared them.
    text = (data / "manifest.json").read_text()
    digest = json.loads(text)["parts"]["test"][0]["files"]["ids"]["sha256"]
    (data / "manifest.json").write_text(text.replace(digest, "0" * 64))
    verifying.check_unchanged(data, said.append)
    assert [getattr(one, "name", READING in one) for one in said] == [True, "test-0-ids.npy"]


def test_files_without_a_good_record_are_read_once_if_one_can_be_written(tmp_path):
    data = shutil.copytree(prepared(tmp_path / "data"), tmp_path / "copy")
    for record in (None, "", '{"files": 7}'):
        (data / "verified.json").unlink(missing_ok=True)
        if record is not None:
            (data / "verified.json").write_text(record)
        said = []
        for _ in range(2):
            verifying.check_unchanged(data, said.append)
            assert READING in said[0] and len(said) == 1
    (data / "verified.json").unlink()
    (data / "verified.json").mkdir()
    verifying.check_unchanged(data, said.append)
    assert READING in said[1]
    assert "verified.json cannot be written, so they are read before every run" in said[2]


@pytest.mark.slow
def test_all_ranks_are_told_of_a_changed_shard(tmp_path):
    data = prepared(tmp_path / "data")
    change_a_value(data / "train-0-label.npy")
    for per_node in (1, 2):
        told = run_ranks(2, refusal_of, str(data), 2, ranks_per_node=per_node)
        assert told[0] == told[1]
        assert "train-0-label.npy: its content has changed" in told[0][0] and told[0][1]


@pytest.mark.slow
def test_a_run_has_links_to_what_was_learned_and_is_not_continued_on_other_ids(tmp_path, capsys):
    data = prepared_movies(tmp_path)
    run_prepared(tmp_path, data, ["run.name=other"])
    run_prepared(tmp_path, data, [])
    # The links change no file.
    assert READING not in capsys.readouterr().err
    learned = "learned/user.parquet"
    assert (tmp_path / "small/inputs" / learned).samefile(data / learned)
    same = shutil.copytree(data, tmp_path / "same")
    swap_users(data)
    with pytest.raises(DataError, match=r"user.parquet: .* since the data were prepared; del"):
        run_prepared(tmp_path, data, RESUME)
    # As many users as before, but two have each other's row.
    sign_learned(data)
    with pytest.raises(RunFolderError, match=r"vocabulary_sha256: '\w+' in the checkpoint"):
        run_prepared(tmp_path, data, RESUME)
    run_prepared(tmp_path, same, RESUME)


@pytest.mark.slow
def test_a_run_with_another_vocabulary_begins_anew_with_its_weights(tmp_path):
    """The same rows, but ids that are seen once have a row now."""
    folder = movie_folder(tmp_path / "run")
    train_on_movies(folder)
    movie_folder(folder, schema=MOVIES.replace("min_count: 2", "min_count: 1"))
    saved = newest(folder / "movies/checkpoints")
    said = (
        r"(?s)on other data.*_sha256: '\w+' in .*sizes.user: \d+ in the checkpoint, \d+ now"
        r".*start a new run with its weights: write another run.name, and "
        rf"checkpoint.init_from={saved}"
    )
    with pytest.raises(RunFolderError, match=said):
        train_on_movies(folder, *RESUME)
    train_on_movies(folder, f"checkpoint.init_from={saved}", "run.name=new")


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
    with pytest.raises(DataError, match=r"learned.json: damaged .*No such file.*parquet.*delete"):
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
        ("data.path=bad.csv", r"found 'yes'.*\(or data.on_bad_row=skip to leave such rows out\)"),
    ],
)
def test_a_refused_run_leaves_nothing_and_prepares_nothing(raw_log, override, words, monkeypatch):
    folder, train = raw_log
    monkeypatch.chdir(folder)
    (folder / "empty.csv").write_text("")
    (folder / "bad.csv").write_text((folder / "log.csv").read_text().replace("\n1,", "\nyes,"))
    before = sorted(folder.rglob("*"))
    if override.startswith("evaluate"):
        monkeypatch.setattr("stampede.engine.reading.prepare", lambda *_: pytest.fail("prepared"))
    with pytest.raises((DataError, SettingsError), match=words):
        train(override)
    assert sorted(folder.rglob("*")) == before


LONG = ["train.epochs=2", "checkpoint.every_steps=3"]


def test_a_run_whose_checkpoints_are_lost_begins_anew_unless_it_has_ended(tmp_path, capsys):
    run_small(tmp_path, LONG)
    run = tmp_path / "small"
    # The lock is gone with its run.
    assert {path.name for path in tmp_path.iterdir()} == {"small", "small.yaml"}
    whole = without_times(run)
    shutil.rmtree(run / "checkpoints")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(RunFolderError, match=r"that has ended, and no checkpoint .*overwrite=true"):
        run_small(tmp_path, [*LONG, "checkpoint.resume=auto", "train.epochs=3"])
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    (run / "summary.json").unlink()
    assert "starts from scratch" not in capsys.readouterr().out
    run_small(tmp_path, [*LONG, "checkpoint.resume=auto"])
    said = capsys.readouterr().out
    assert f"the run starts from scratch; {len(whole)} lines of metrics.jsonl are dropped" in said
    assert without_times(run) == whole


def test_missing_lines_of_a_continued_run_are_told(tmp_path, capsys):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"kind": "train"}\n{"kind')
    folder.keep_lines(3)
    assert "metrics.jsonl: 2 lines of earlier steps are missing" in capsys.readouterr().out
    assert folder.metrics_lines == 1
