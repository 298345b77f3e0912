"""Reading as configured: order, residence, and what a continued run may change."""

from unittest import mock

import pytest
import torch

import stampede.engine.reading as reading
from stampede.data import DataError
from stampede.engine.errors import RunFolderError
from stampede.engine.processes import processes
from stampede.engine.reading import Reader, open_dataset
from stampede.settings import SettingsError
from support.jobs import lines
from support.prepared import drawn_fields, drawn_rows, write_prepared
from support.reading import prepared, prepared_config, run_prepared


def reader_of(config):
    with processes("cpu") as here:
        return Reader(config, open_dataset(config, here), here)


def rows_read(batches):
    return [row for batch in batches for row in batch.dense[:, 0].tolist()]


def test_training_is_shuffled_and_evaluation_is_not(tmp_path):
    reader = reader_of(prepared_config(tmp_path, prepared(tmp_path / "data"), "run.seed=4"))
    training = reader.training()
    assert training.state_dict()["order"]["seed"] == 4
    first, second = rows_read(training), rows_read(training)
    assert first != second and sorted(first) == sorted(second) == list(range(333))
    assert rows_read(reader.evaluation(reader.dataset.test)) == list(range(67))


def test_training_on_the_last_rows(tmp_path):
    folder = prepared(tmp_path / "data")
    reader = reader_of(prepared_config(tmp_path, folder, "data.train_rows=100"))
    assert sorted(rows_read(reader.training())) == list(range(233, 333))
    assert rows_read(reader.evaluation(reader.dataset.test)) == list(range(67))
    small = ["data.train_rows=100", "data.memory_gb=1e-6"]
    reader = reader_of(prepared_config(tmp_path, folder, *small))
    assert reader.residence == "disk"
    assert reader.training().state_dict()["order"]["shuffle"] == "block"
    assert sorted(rows_read(reader.training())) == list(range(233, 333))
    reader = reader_of(prepared_config(tmp_path, folder, "data.train_rows=1000"))
    assert reader.dataset.train.rows == 333


@pytest.mark.parametrize(
    "overrides, shuffle, residence",
    [
        ([], "global", "memory"),
        # The training part has 333 rows of some 40 bytes.
        (["data.memory_gb=1e-5"], "block", "disk"),
        (["data.memory_gb=1e-5", "data.shuffle=global"], "global", "disk"),
        (["data.memory_gb=1e-5", "data.residence=device"], "block", "device"),
        (["data.shuffle=none"], "none", "memory"),
    ],
)
def test_what_auto_chooses(tmp_path, overrides, shuffle, residence):
    reader = reader_of(prepared_config(tmp_path, prepared(tmp_path / "data"), *overrides))
    order = reader.training().state_dict()["order"]
    assert (order["shuffle"], reader.residence) == (shuffle, residence)


def test_data_that_do_not_fit_on_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "place", mock.Mock(side_effect=torch.OutOfMemoryError("no")))
    with pytest.raises(SettingsError, match=r"data.residence: found 'device'.*=memory or disk"):
        reader_of(prepared_config(tmp_path, prepared(tmp_path / "data"), "data.residence=device"))


@pytest.mark.slow
def test_a_continued_run_may_move_its_data_but_not_reorder_them(tmp_path, capsys):
    data = prepared(tmp_path / "data")
    run_prepared(tmp_path, data, [])
    more = ["checkpoint.resume=auto", "train.epochs=2"]
    with pytest.raises(RunFolderError, match=r"data.shuffle: 'auto' .* 'none' now"):
        run_prepared(tmp_path, data, [*more, "data.shuffle=none"])
    with pytest.raises(
        RunFolderError,
        match=r"data.shuffle=auto data.memory_gb=1e-05 .* another order .*; write "
        r"data.shuffle=auto data.memory_gb=4.0 as in the checkpoint",
    ):
        run_prepared(tmp_path, data, [*more, "data.memory_gb=1e-5"])
    # Memory that makes no difference to the order may change.
    run_prepared(tmp_path, data, [*more, "data.memory_gb=8"])
    more[-1] = "train.epochs=3"
    run_prepared(tmp_path, data, [*more, "data.residence=device"])
    assert "data.residence='device' (was 'auto')" in capsys.readouterr().out
    assert max(line["step"] for line in lines(tmp_path / "small")) == 18


@pytest.mark.parametrize("before, now, told, wanted", [
    ({"cache_gb": None}, 1e-5, "1e-05", "null"),
    # Of a checkpoint from before the key.
    ({}, 1e-5, "1e-05", "null"),
    ({"cache_gb": 1e-5}, None, "null", "1e-05"),
])  # fmt: skip
def test_a_refusal_tells_cache_gb_apart_from_none(tmp_path, before, now, told, wanted):
    config = prepared_config(tmp_path, prepared(tmp_path / "data"))
    section = config.data.model_copy(update={"memory_gb": 1e-5, "cache_gb": now})
    with processes("cpu") as here:
        dataset = open_dataset(config, here)
        first = Reader(config, dataset, here)
        state = first.state_dict(first.training())
        settings = {"shuffle": "auto", "memory_gb": 1e-5, **before}
        reader = Reader(config.model_copy(update={"data": section}), dataset, here)
        with pytest.raises(
            RunFolderError,
            match=rf"^data.shuffle=auto data.memory_gb=1e-05 data.cache_gb={told} puts .* write "
            rf"data.shuffle=auto data.memory_gb=1e-05 data.cache_gb={wanted} as in",
        ):
            reader.load_state_dict(reader.training(), {**state, "settings": settings})


def test_a_state_of_other_data_is_refused(tmp_path):
    reader = reader_of(prepared_config(tmp_path, prepared(tmp_path / "data")))
    other = reader_of(prepared_config(tmp_path, prepared(tmp_path / "other", train=300)))
    with pytest.raises(RunFolderError, match="use the same data"):
        other.load_state_dict(other.training(), reader.state_dict(reader.training()))


def test_a_part_without_any_weight_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_PIECE", 16)
    parts = {name: drawn_rows(40, weight=True) for name in ("train", "validation", "test")}
    for name in ("validation", "test"):
        # A weight in the last piece is enough.
        parts[name]["weight"][:] = [0] * 39 + [0.5]
    reader_of(prepared_config(tmp_path, write_prepared(tmp_path / "one", parts, drawn_fields())))
    parts["test"]["weight"][39] = 0
    data = write_prepared(tmp_path / "none", parts, drawn_fields())
    with pytest.raises(DataError, match="all 40 samples of the test part have weight 0"):
        reader_of(prepared_config(tmp_path, data))
