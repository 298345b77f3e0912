"""Prepared data that are not as they were prepared are refused, and others are not read for it."""

import json
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

READING = "were written at another time than manifest.json says; reading them"


def change_a_value(path):
    """Another value in an array; the file is as long as before."""
    array = np.load(path)
    array[0] = 1 - array[0]
    np.save(path, array)


def without_times(data):
    """As manifests of older versions are."""
    manifest = json.loads((data / "manifest.json").read_text())
    for shards in manifest["parts"].values():
        for shard in shards:
            for entry in shard["files"].values():
                del entry["mtime_ns"]
    (data / "manifest.json").write_text(json.dumps(manifest))


def test_a_changed_shard_is_refused_before_training(tmp_path):
    data = prepared(tmp_path / "data")
    path = data / "test-0-label.npy"
    change_a_value(path)
    with pytest.raises(DataError) as refusal:
        run_prepared(tmp_path, data, [])
    assert str(refusal.value).startswith(f"{path}: its content has changed (SHA-256 differs)")
    assert f"--verify {data}" in str(refusal.value)
    assert not (tmp_path / "small").exists()


def test_untouched_files_are_not_read(tmp_path, monkeypatch):
    data = prepared(tmp_path / "data")
    monkeypatch.setattr(verifying, "difference", None)
    run_prepared(tmp_path, data, [])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["copied", "old"])
def test_files_of_other_times_are_read_until_they_are_verified(tmp_path, capsys, how):
    data = prepared(tmp_path / "data")
    if how == "old":
        without_times(data)
    else:
        data = shutil.copytree(data, tmp_path / "copy", copy_function=shutil.copy)
    for name in ("one", "two"):
        run_prepared(tmp_path, data, [f"run.name={name}"])
        said = capsys.readouterr().err
        assert f"files (0 MB) {READING}" in said and f"--verify {data}" in said
    verify(data)
    run_prepared(tmp_path, data, ["run.name=three"])
    assert READING not in capsys.readouterr().err
    change_a_value(data / "train-0-label.npy")
    with pytest.raises(DataError, match=r"train-0-label.npy: its content has changed"):
        run_prepared(tmp_path, data, ["run.name=four"])


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
