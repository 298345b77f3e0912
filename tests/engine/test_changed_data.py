"""Prepared data that are not as they were prepared are refused, and others are not read for it."""

import json
import os
import shutil

import numpy as np
import pytest

from stampede.data import DataError
from stampede.data.prepared import verify as verifying
from stampede.data.prepared.verify import verify
from support.movie_runs import prepared_movies
from support.ranks import run_ranks
from support.reading import prepared, refusal_of, run_prepared
from support.tampering import swap_users

READING = "not verified here yet; reading them"


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
    assert path.stat().st_size == before.st_size
    if keeps_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataError) as refusal:
        run_prepared(tmp_path, data, [])
    assert str(refusal.value).startswith(f"{path}: its content has changed (SHA-256 differs)")
    assert f"--verify {data}" in str(refusal.value)
    assert not (tmp_path / "small").exists()


@pytest.mark.slow
def test_files_that_were_not_verified_here_are_read_once(tmp_path, capsys):
    data = shutil.copytree(prepared(tmp_path / "data"), tmp_path / "copy")
    run_prepared(tmp_path, data, ["run.name=one"])
    assert f"files (0 MB) {READING}" in capsys.readouterr().err
    run_prepared(tmp_path, data, ["run.name=two"])
    assert READING not in capsys.readouterr().err
    change_a_value(data / "train-0-label.npy")
    with pytest.raises(DataError, match=r"train-0-label.npy: its content has changed"):
        run_prepared(tmp_path, data, ["run.name=three"])


def test_what_is_verified_is_recorded(tmp_path, monkeypatch):
    data = shutil.copytree(prepared(tmp_path / "data"), tmp_path / "copy")
    verify(data)
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


@pytest.mark.parametrize("record", ["", '{"files": 7}'])
def test_a_record_that_is_damaged_is_none(tmp_path, record):
    data = prepared(tmp_path / "data")
    (data / "verified.json").write_text(record)
    said = []
    verifying.check_unchanged(data, said.append)
    assert READING in said[0] and len(said) == 1
    verifying.check_unchanged(data, said.append)
    assert len(said) == 1


def test_a_record_that_cannot_be_written(tmp_path):
    data = prepared(tmp_path / "data")
    (data / "verified.json").unlink()
    (data / "verified.json").mkdir()
    said = []
    verifying.check_unchanged(data, said.append)
    assert READING in said[0]
    assert "verified.json cannot be written, so they are read before every run" in said[1]


@pytest.mark.slow
def test_all_ranks_are_told_of_a_changed_shard(tmp_path):
    data = prepared(tmp_path / "data")
    change_a_value(data / "train-0-label.npy")
    for per_node in (1, 2):
        told = run_ranks(2, refusal_of, str(data), 2, ranks_per_node=per_node)
        assert told[0] == told[1]
        assert "train-0-label.npy: its content has changed" in told[0][0] and told[0][1]


@pytest.mark.slow
def test_a_changed_vocabulary_is_refused(tmp_path):
    data = prepared_movies(tmp_path)
    run_prepared(tmp_path, data, [])
    swap_users(data)
    for more in (["run.name=other"], ["checkpoint.resume=auto", "train.epochs=2"]):
        with pytest.raises(DataError, match=r"user.parquet: .* since the data were prepared; del"):
            run_prepared(tmp_path, data, more)


@pytest.mark.slow
def test_what_was_learned_is_linked_by_runs(tmp_path, capsys):
    data = prepared_movies(tmp_path)
    for name in ("one", "two"):
        run_prepared(tmp_path, data, [f"run.name={name}"])
        assert READING not in capsys.readouterr().err
    path = "learned/user.parquet"
    assert (tmp_path / "two/inputs" / path).samefile(data / path)
