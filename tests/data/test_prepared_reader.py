"""Prepared folders, whole and damaged, on disk, in memory or on a device."""

import json
import os
import re

import numpy as np
import pytest
import torch

from stampede.data import DataError, GlobalBatches, Order, SyntheticClicks, click_shares
from stampede.data import residence as places
from stampede.data.order import BLOCK_ROWS
from stampede.data.prepared.reader import open_prepared
from stampede.data.prepared.verify import verify
from stampede.data.residence import Readahead, choose_residence, make_order, place
from stampede.data.samples import Slice
from support.prepared import drawn_fields, drawn_rows, write_prepared, write_small


@pytest.fixture
def folder(tmp_path):
    return write_small(tmp_path / "data")


def test_a_folder_is_opened_as_it_was_written(folder):
    dataset = open_prepared(folder)
    assert dataset.vocabulary_sizes == {"C1": 50, "C2": 50, "C3": 50, "M1": 50, "M2": 50}
    assert (dataset.numbers, dataset.multi, dataset.has_weight) == (2, ("M1", "M2"), True)
    assert [p.rows for p in (dataset.train, dataset.validation, dataset.test)] == [50, 7, 20]
    # Nothing is read yet.
    assert all(isinstance(m, np.memmap) for s in dataset.train.shards for m in s.maps.values())
    arrays = drawn_rows(50, multi=2, weight=True)
    rows = np.array([0, 3, 19, 20, 20, 41, 49])
    read = dataset.train.read(torch.from_numpy(rows))
    label = dataset.train.label(torch.from_numpy(rows))
    weight = dataset.train.weight(torch.from_numpy(rows))
    for found, name in (
        (read.ids, "ids"), (read.dense, "numbers"), (read.label, "label"), (label, "label"),
        (read.weight, "weight"), (weight, "weight"),
    ):  # fmt: skip
        np.testing.assert_array_equal(found, arrays[name][rows])
    for i, bag in enumerate(read.bags):
        offsets, values = arrays[f"offsets_{i}"], arrays[f"values_{i}"]
        wanted = [values[offsets[row] : offsets[row + 1]].tolist() for row in rows]
        assert bag.values.tolist() == [value for bag in wanted for value in bag]
        assert bag.lengths.tolist() == [len(bag) for bag in wanted]


def test_share_of_clicks(folder, monkeypatch):
    monkeypatch.setattr("stampede.data.samples._CHUNK", 7)
    arrays = drawn_rows(50, multi=2, weight=True)
    weight = arrays["weight"].astype(np.float64)
    part = open_prepared(folder).train
    for start, stop in ((0, 50), (3, 40)):
        expected = np.average(arrays["label"][start:stop], weights=weight[start:stop])
        (found,) = click_shares(Slice(part, start, stop))
        assert found.share == pytest.approx(expected, rel=1e-12)
    monkeypatch.setattr(type(part), "weight", lambda _, rows: torch.zeros(len(rows)))
    assert [found.share for found in click_shares(part)] == [None]


def test_a_damaged_file_is_named(folder):
    path = folder / "train-0-ids.npy"
    whole = path.read_bytes()
    for damaged in (whole[:-40], whole + b"1", bytes(len(whole)), None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"^{path}: .*--verify {folder}"):
            open_prepared(folder)


def test_verify_names_every_file_that_differs(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["learned"] = [{"name": "learned.json", "bytes": 2, "sha256": "0" * 64}]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "learned.json").write_text("{}")
    path = folder / "test-0-values_1.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    gone = folder / "validation-0-label.npy"
    gone.unlink()
    with pytest.raises(DataError) as refusal:
        verify(folder)
    text = str(refusal.value)
    assert "3 of " in text and f"{gone}: No such file" in text
    for changed in (path, folder / "learned.json"):
        assert f"{changed}: its content has changed" in text


def test_folders_that_cannot_be_used(tmp_path):
    parts = {"train": drawn_rows(4), "test": drawn_rows(0)}
    folder = write_prepared(tmp_path / "data", parts, drawn_fields())
    with pytest.raises(DataError, match="test part has no rows"):
        open_prepared(folder)
    manifest = folder / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:100])
    with pytest.raises(DataError, match=r"manifest.json: damaged.*delete the folder to prepare"):
        open_prepared(folder)


CPU = torch.device("cpu")


@pytest.fixture
def dataset(tmp_path):
    parts = {
        "train": drawn_rows(500, multi=1, weight=True),
        "test": drawn_rows(40, multi=1, weight=True, seed=1),
    }
    return open_prepared(write_prepared(tmp_path / "data", parts, drawn_fields(multi=1), 150))


def everything(part, order, **more):
    batches = GlobalBatches(part, ["C1", "C2", "C3", "M1"], 64, 1, 2, order, **more)
    return [
        (batch.sparse.values(), batch.sparse.lengths(), batch.dense, batch.label, batch.weight)
        for epoch in range(2)
        for batch in batches.epoch(epoch)
    ]


@pytest.mark.parametrize("shuffle", ["global", "block", "none"])
def test_batches_do_not_depend_on_the_residence(dataset, shuffle):
    order = Order(500, shuffle, 3, 128 if shuffle == "block" else 0, 16)
    disk = everything(dataset.train, order, ahead=2, before_reading=Readahead(dataset.train, order))
    for residence in ("memory", "device"):
        placed = place(dataset, residence, CPU).train
        assert len(placed.shards) == (1 if residence == "device" else 4)
        for one, other in zip(disk, everything(placed, order), strict=True):
            assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("rows", [500, 499, 350, 349, 50, 1])
def test_the_last_rows(dataset, rows):
    """Of shards of 150 rows, on disk and on a device, by themselves and by their order."""
    whole, part = dataset.train, dataset.train.last(rows)
    assert part.rows == rows and len(part.shards) == -(-(rows + 100) // 150)
    every = torch.arange(rows)
    expected = whole.read(every + 500 - rows)
    for one in (part, part.resident(CPU), part.resident(CPU).last(rows)):
        found = one.read(every)
        assert torch.equal(found.ids, expected.ids) and torch.equal(found.dense, expected.dense)
        assert torch.equal(found.bags[0].values, expected.bags[0].values)
        assert torch.equal(one.label(every), whole.label(every + 500 - rows))
        assert torch.equal(one.weight(every), whole.weight(every + 500 - rows))
    order = Order(rows, "block", 3, 32, 16)
    disk = everything(part, order, ahead=2, before_reading=Readahead(part, order))
    for one, other in zip(disk, everything(part.resident(CPU), order), strict=True):
        assert all(map(torch.equal, one, other))


def test_the_choice_of_the_residence(dataset, monkeypatch):
    size = sum(part.bytes for part in dataset.parts().values())
    assert choose_residence("auto", dataset, size, CPU) == "memory"
    assert choose_residence("auto", dataset, size - 1, CPU) == "disk"
    assert choose_residence("disk", dataset, size, CPU) == "disk"
    gpu = torch.device("cuda", 0)
    for free, chosen in ((2 * size + 2, "device"), (2 * size, "memory")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 10 * size))
        assert choose_residence("auto", dataset, size, gpu) == chosen
    assert choose_residence("auto", SyntheticClicks(scale=0.0005).dataset(9, 9), 1, CPU) == "memory"


def test_the_order_depends_on_the_size_of_the_data_not_on_shards_or_residence(tmp_path):
    """At the very sizes where it changes, in 1 to 50 shards of bags."""
    arrays = drawn_rows(500, multi=2)
    size = sum(array.nbytes for array in arrays.values())
    for shard_rows in (None, 150, 10):
        folder = write_prepared(tmp_path / f"{shard_rows}", {"train": arrays, "test": arrays},
                                drawn_fields(multi=2), shard_rows)  # fmt: skip
        dataset = open_prepared(folder)
        for residence in ("disk", "device"):
            part = place(dataset, residence, CPU).train
            assert make_order(part, "auto", size, 1) == Order(500, "global", 1)
            assert make_order(part, "auto", size - 1, 1) == Order(500, "block", 1, BLOCK_ROWS)
            # A window has the rows of a quarter of the memory, in whole blocks.
            memory = 4 * size / 500 * 2 * BLOCK_ROWS
            assert make_order(part, "block", memory, 1) == Order(500, "block", 1, 2 * BLOCK_ROWS)


@pytest.mark.parametrize("shuffle", ["block", "none"])
def test_readahead_asks_for_every_window_before_it_is_read(dataset, monkeypatch, shuffle):
    """At every batch: what it reads was asked for, and was not forgotten since."""
    part = dataset.train
    order = Order(500, shuffle, 3, 64, 16)
    there, held = {}, []

    def advise(array, start, stop, advice):
        fresh = advice == os.POSIX_FADV_WILLNEED
        name = array.filename.name
        there.setdefault(name, np.zeros(len(array), bool))[start:stop] = fresh

    monkeypatch.setattr(places, "_advise_file", advise)
    readahead = Readahead(part, order)
    for epoch in range(3):
        for start in range(0, 500, 32):
            readahead(epoch, start)
            rows = np.sort(order.rows_at(epoch, start, min(start + 32, 500)))
            for i, shard in enumerate(part.shards):
                mine = rows[(rows >= 150 * i) & (rows < 150 * (i + 1))] - 150 * i
                for name, flags in there.items():
                    if name.startswith(f"train-{i}-") and "values" not in name:
                        assert flags[mine].all()
                offsets = shard.maps["offsets_0"]
                for row in mine:
                    assert there[f"train-{i}-values_0.npy"][offsets[row] : offsets[row + 1]].all()
            held.append(sum(int(flags.sum()) for name, flags in there.items() if "label" in name))
    # The one before the last, the last, this and the next window; not the whole part.
    assert max(held) <= 4 * 64 + 16


@pytest.mark.wide
def test_old_windows_are_dropped_from_memory(tmp_path):
    """The resident memory of a long epoch stays near that of its windows."""
    rows = 1 << 19
    arrays = drawn_rows(rows, single=26, numbers=13)
    folder = write_prepared(tmp_path / "data", {"train": arrays, "test": drawn_rows(5, 26, 13)},
                            drawn_fields(26))  # fmt: skip
    del arrays
    part = open_prepared(folder).train
    order = Order(rows, "block", 0, 1 << 16)

    def mapped():
        with open("/proc/self/smaps") as file:
            sizes = re.findall(rf"{folder}/\S+\n.*?^Rss: +(\d+) kB", file.read(), re.M | re.S)
        return 1024 * sum(map(int, sizes))

    def peak(**more):
        batches = GlobalBatches(part, [f"C{i}" for i in range(26)], 1 << 14, 0, 1, order, **more)
        return max(mapped() for _ in batches)

    window = part.bytes * (1 << 16) / rows
    bounded = peak(before_reading=Readahead(part, order))
    assert bounded < 4 * window
    assert peak() > 1.5 * bounded
