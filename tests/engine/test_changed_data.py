"""Prepared data that are not as they were prepared are refused, and others are not read for it."""

import errno
import os
import shutil
import time

import numpy as np
import pytest

from stampede.data import DataError
from stampede.data.prepared import changed
from stampede.data.prepared.verify import verify
from support.movie_runs import prepared_movies
from support.ranks import run_ranks
from support.reading import prepared, refusal_of, run_prepared
from support.tampering import set_time, swap_users

READING = "are newer than manifest.json; reading them"


def change_a_value(path):
    """Another value in an array; the file is as long as before."""
    array = np.load(path)
    array[0] = 1 - array[0]
    np.save(path, array)


@pytest.mark.parametrize("later", [1, 10**10, 0, -(10**9), -3600 * 10**9])
def test_a_changed_shard_is_refused_before_training(tmp_path, later):
    """Also where it got an earlier time, as by `cp -p`."""
    data = prepared(tmp_path / "data")
    path = data / "test-0-label.npy"
    change_a_value(path)
    set_time(path, later)
    with pytest.raises(DataError) as refusal:
        run_prepared(tmp_path, data, [])
    assert str(refusal.value).startswith(f"{path}: its content has changed (SHA-256 differs)")
    assert f"--verify {data}" in str(refusal.value)
    assert not (tmp_path / "small").exists()


def test_a_shard_changed_after_the_clock_was_put_back(tmp_path):
    data = prepared(tmp_path / "data")
    change_a_value(data / "train-0-label.npy")
    os.utime(data / "manifest.json", (time.time(), time.time() + 3600))
    with pytest.raises(DataError, match=r"train-0-label.npy: its content has changed"):
        run_prepared(tmp_path, data, [])


def test_untouched_files_are_not_read(tmp_path, monkeypatch):
    data = prepared(tmp_path / "data")
    monkeypatch.setattr(changed, "difference", None)
    run_prepared(tmp_path, data, [])


@pytest.mark.parametrize("copy", [shutil.copy2, shutil.copy])
def test_a_copied_folder_is_read_once(tmp_path, capsys, copy):
    """With its times and without."""
    data = shutil.copytree(prepared(tmp_path / "first"), tmp_path / "data", copy_function=copy)
    # Whichever was copied last.
    set_time(data / "train-0-ids.npy", 1)
    run_prepared(tmp_path, data, ["run.name=one"])
    assert f"files (0 MB) {READING}" in capsys.readouterr().err
    run_prepared(tmp_path, data, ["run.name=two"])
    assert READING not in capsys.readouterr().err
    path = data / "train-0-label.npy"
    change_a_value(path)
    set_time(path, -(10**9))
    with pytest.raises(DataError, match=r"train-0-label.npy: its content has changed"):
        run_prepared(tmp_path, data, ["run.name=three"])


def test_a_copied_folder_is_not_read_when_it_was_verified(tmp_path, capsys):
    data = prepared(tmp_path / "data")
    os.utime(data / "manifest.json", ns=(0, 10**18))
    verify(data)
    run_prepared(tmp_path, data, [])
    assert READING not in capsys.readouterr().err


def test_a_copied_folder_that_cannot_be_written_is_read_again(tmp_path, capsys, monkeypatch):
    data = prepared(tmp_path / "data")
    os.utime(data / "manifest.json", ns=(0, 10**18))

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    for name in ("one", "two"):
        run_prepared(tmp_path, data, [f"run.name={name}"])
        assert READING in capsys.readouterr().err


def test_all_ranks_are_told_of_a_changed_shard(tmp_path):
    data = prepared(tmp_path / "data")
    change_a_value(data / "train-0-label.npy")
    set_time(data / "train-0-label.npy", -(10**9))
    for per_node in (1, 2):
        told = run_ranks(2, refusal_of, str(data), 2, ranks_per_node=per_node)
        assert told[0] == told[1]
        assert "train-0-label.npy: its content has changed" in told[0][0] and told[0][1]


def test_a_changed_vocabulary_is_refused(tmp_path):
    data = prepared_movies(tmp_path)
    run_prepared(tmp_path, data, [])
    swap_users(data)
    os.utime(data / "learned/user.parquet", (0, 0))
    for more in (["run.name=other"], ["checkpoint.resume=auto", "train.epochs=2"]):
        with pytest.raises(DataError, match=r"user.parquet: .* since the data were prepared; del"):
            run_prepared(tmp_path, data, more)


def test_links_of_runs_do_not_make_what_was_learned_newer(tmp_path, capsys):
    data = prepared_movies(tmp_path)
    for name in ("one", "two"):
        run_prepared(tmp_path, data, [f"run.name={name}"])
        assert READING not in capsys.readouterr().err
    path = "learned/user.parquet"
    assert (tmp_path / "two/inputs" / path).samefile(data / path)
