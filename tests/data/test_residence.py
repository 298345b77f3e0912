"""Data on disk, in memory, on a device: the same batches; the order depends on settings only."""

import os
import re

import numpy as np
import pytest
import torch

from stampede.data import GlobalBatches, Order, SyntheticClicks
from stampede.data import residence as places
from stampede.data.order import BLOCK_ROWS
from stampede.data.prepared.reader import open_prepared
from stampede.data.residence import Readahead, choose_residence, make_order, place
from support.prepared import drawn_fields, drawn_rows, write_prepared

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


@pytest.mark.slow
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
