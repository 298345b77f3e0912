"""Data that are not as they were prepared are refused, and a run is not continued on others."""

import json
import os
import shutil

import numpy as np
import pytest

from stampede.data import DataError
from stampede.data.prepared import verify as verifying
from stampede.data.prepared.verify import verify
from stampede.engine.checkpoint.retention import newest
from stampede.engine.errors import RunFolderError
from stampede.engine.processes import processes
from stampede.engine.reading import open_dataset
from support.movie_runs import prepared_movies, train_on_movies
from support.movies import MOVIES
from support.ranks import run_ranks
from support.reading import prepared, prepared_config, run_prepared
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


@pytest.mark.parametrize("record", [None, "", '{"files": 7}'])
def test_files_without_a_good_record_are_read_once(tmp_path, record):
    data = shutil.copytree(prepared(tmp_path / "data"), tmp_path / "copy")
    if record is not None:
        (data / "verified.json").write_text(record)
    said = []
    for _ in range(2):
        verifying.check_unchanged(data, said.append)
        assert READING in said[0] and len(said) == 1


def test_a_record_that_cannot_be_written(tmp_path):
    data = prepared(tmp_path / "data")
    (data / "verified.json").unlink()
    (data / "verified.json").mkdir()
    said = []
    verifying.check_unchanged(data, said.append)
    assert READING in said[0]
    assert "verified.json cannot be written, so they are read before every run" in said[1]


def refusal_of(data, world_size):
    """What a rank is told of a folder that cannot be used, and whether all know of it."""
    config = prepared_config(data.parent, data, world_size=world_size)
    with processes("cpu") as here:
        try:
            open_dataset(config, here)
        except DataError as failure:
            return str(failure), failure.known_to_all_ranks


@pytest.mark.slow
def test_all_ranks_are_told_of_a_changed_shard(tmp_path):
    data = prepared(tmp_path / "data")
    change_a_value(data / "train-0-label.npy")
    for per_node in (1, 2):
        told = run_ranks(2, refusal_of, data, 2, ranks_per_node=per_node)
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
