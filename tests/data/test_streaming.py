"""Prepared data that are read from a store: the rows of a disk, in bounded room."""

from functools import partial
from threading import Thread

import numpy as np
import pytest
import torch

from stampede import stores
from stampede.data import GlobalBatches, Order
from stampede.data.prepared import streaming
from stampede.data.prepared.manifest import read_manifest
from stampede.data.prepared.reader import open_prepared
from stampede.data.prepared.streaming import is_streamed, make_files, open_streamed
from stampede.data.residence import Readahead, choose_residence
from support.object_store import BUCKET, between, object_store
from support.prepared import drawn_fields, drawn_rows, write_prepared
from support.ranks import run_ranks

URL = f"{BUCKET}/prepared"


@pytest.fixture
def store(tmp_path):
    with object_store(tmp_path / "stores") as files:
        yield files


def put(store, folder, arrays, shard_rows, **fields):
    """Prepared data here and in the store; the folder."""
    write_prepared(folder, {"train": arrays, "test": arrays}, drawn_fields(**fields), shard_rows)
    store.put(str(folder), URL, recursive=True)
    return folder


def streamed(place, room=0):
    """The data set of the store, whose files in `place` this process may be the first to need."""
    folder = stores.fetched(URL, without=is_streamed)
    if not place.exists():
        make_files(place, read_manifest(folder))
    return open_prepared(folder, partial(open_streamed, URL, place, room))


def epochs(part, order, count=2, ahead=2):
    """The samples of some epochs."""
    batches = GlobalBatches(
        part, ["C1", "C2", "C3", "M1", "M2"], 48, 0, 1, order,
        ahead=ahead, before_reading=Readahead(part, order),
    )  # fmt: skip
    return [batch for _ in range(count) for batch in batches]


def assert_same(found, expected):
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.dense, other.dense) and torch.equal(one.label, other.label)
        assert torch.equal(one.weight, other.weight)
        assert torch.equal(one.sparse.values(), other.sparse.values())
        assert torch.equal(one.sparse.lengths(), other.sparse.lengths())


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("shuffle, numbers", [("block", 2), ("none", 0)])
def test_the_rows_are_those_of_a_disk(store, tmp_path, monkeypatch, shuffle, numbers):
    monkeypatch.setattr(streaming, "_CHUNK", 16)
    arrays = drawn_rows(500, multi=2, weight=True, numbers=numbers)
    folder = put(store, tmp_path / "here", arrays, 150, multi=2)
    there, here = streamed(tmp_path / "files"), open_prepared(folder)
    order = Order(500, shuffle, 3, 64, 16)
    assert there.train.bytes == here.train.bytes
    assert_same(epochs(there.train, order), epochs(here.train, order))
    # The files that hold most of the data were not copied.
    assert not [file for file in stores.local(URL).iterdir() if is_streamed(file.name)]
    last = Order(333, shuffle, 3, 64, 16)
    assert_same(epochs(there.train.last(333), last), epochs(here.train.last(333), last))
    # Also where no window was asked for.
    rows = torch.tensor([499, 3, 160])
    assert torch.equal(there.test.read(rows).ids, here.test.read(rows).ids)
    assert choose_residence("auto", there, 1e12, torch.device("cpu")) == "disk"


def room(place):
    """Bytes that the files take on the disk."""
    return sum(512 * file.stat().st_blocks for file in place.iterdir())


@pytest.mark.wide
def test_the_room_is_used_and_bounded(store, tmp_path):
    rows, window, windows = 1 << 17, 1 << 14, 4
    arrays = drawn_rows(rows, single=26, numbers=13)
    folder = put(store, tmp_path / "here", arrays, 50_000, single=26)
    size = open_prepared(folder).train.bytes * window / rows
    # Half of it is for the training part.
    part = streamed(tmp_path / "files", 2 * windows * size).train
    order = Order(rows, "block", 0, window, 1 << 12)
    fields, most = [f"C{i + 1}" for i in range(26)], 0
    batches = GlobalBatches(
        part, fields, 4096, 0, 1, order, ahead=2, before_reading=Readahead(part, order)
    )
    for _ in range(2):
        read = []
        for batch in batches:
            read += batch.dense[:, 0].tolist()
            most = max(most, room(tmp_path / "files"))
        assert sorted(read) == list(range(rows))
    # Blocks begin within chunks of rows. The next window is fetched little by little.
    assert (windows - 2) * size < most < 1.1 * windows * size


@pytest.mark.wide
@pytest.mark.parametrize("single, multi", [(26, 0), (2, 6)])
def test_the_room_is_bounded_in_later_evaluations(store, tmp_path, single, multi):
    rows, window, windows = 1 << 17, 1 << 14, 5
    shape = {"single": single, "multi": multi}
    folder = put(store, tmp_path / "here", drawn_rows(rows, **shape), 50_000, **shape)
    here = open_prepared(folder).test
    copied = [name for name in here.shards[0].arrays if not is_streamed(name)]
    small = sum(shard.arrays[name].nbytes for shard in here.shards for name in copied)
    size = (here.bytes - small) * window / rows
    # A quarter of it is for each part that is evaluated.
    part, order = (
        streamed(tmp_path / "files", 4 * windows * size).test,
        Order(rows, "none", 0, window),
    )
    fields = [f"C{i + 1}" for i in range(single)] + [f"M{i + 1}" for i in range(multi)]
    for _ in range(2):
        most = 0
        for _ in GlobalBatches(
            part, fields, 4096, 0, 1, order, before_reading=Readahead(part, order)
        ):
            most = max(most, room(tmp_path / "files"))
        assert (windows - 2) * size < most < 1.05 * windows * size


@pytest.mark.slow
def test_what_was_dropped_too_early_is_fetched_again(store, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "_CHUNK", 1024)
    arrays = drawn_rows(5000, single=26, multi=0)
    put(store, tmp_path / "here", arrays, 3000, single=26)
    part, rows = streamed(tmp_path / "files").train, torch.arange(5000)
    for _ in range(2):
        np.testing.assert_array_equal(part.read(rows).ids.numpy(), arrays["ids"])
        before = room(tmp_path / "files")
        part.make_room(np.empty((0, 2), np.int64), np.array([[4900, 4950]]))
        assert room(tmp_path / "files") < before / 2


def read_as_rank(folder, environment):
    """The sums of an epoch's ids."""
    import os

    os.environ |= environment
    part, order = streamed(folder / "files").train, Order(500, "block", 3, 64, 16)
    return [int(batch.sparse.values().sum()) for batch in epochs(part, order, 1)]


@pytest.mark.wide
def test_processes_of_a_host_fetch_a_row_once(store, tmp_path):
    import os

    arrays = drawn_rows(500, multi=2, weight=True)
    folder = put(store, tmp_path / "here", arrays, 150, multi=2)
    asked, order = [], Order(500, "block", 3, 64, 16)
    with between(lambda method, path: asked.append(path) if is_streamed(path) else None):
        stores.fetched(URL, without=is_streamed)
        make_files(tmp_path / "files", read_manifest(folder))
        ours = {n: os.environ[n] for n in os.environ if n.startswith(("AWS_", "STAMPEDE_"))}
        found = run_ranks(2, read_as_rank, tmp_path, ours)
    expected = [int(batch.sparse.values().sum())
                for batch in epochs(open_prepared(folder).train, order, 1)]  # fmt: skip
    assert found == [expected, expected]
    # 500 rows are one chunk; each of the shards' four files was asked for once.
    assert len(asked) == len(set(asked)) == 4 * 4


@pytest.mark.wide
def test_a_store_that_fails_is_named(store, tmp_path):
    put(store, tmp_path / "here", drawn_rows(500), 150)
    refuse = []

    def answer(method, path):
        return (403, None) if refuse and is_streamed(path) else None

    with between(answer):
        part = streamed(tmp_path / "files").train
        refuse.append(True)
        part.fetch_ahead(np.array([[0, 500]]))
        with pytest.raises(stores.StoreError, match=rf"{URL}/train-\d-\w+\.npy: access is refused"):
            part.read(torch.arange(500))
        refuse.clear()
        assert len(part.read(torch.arange(500)).ids) == 500


@pytest.mark.wide
def test_rows_that_were_not_fetched_after_a_failure_are_fetched_again(store, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "_CHUNK", 16)
    monkeypatch.setattr(streaming, "_MOST_CHUNKS", 1)
    arrays, refused = drawn_rows(500), []
    put(store, tmp_path / "here", arrays, 150)

    def answer(method, path):
        if is_streamed(path) and not refused:
            refused.append(path)
            return 403, None
        return None

    found = []
    with between(answer):
        part = streamed(tmp_path / "files").train
        with pytest.raises(stores.StoreError, match="access is refused"):
            part.read(torch.arange(500))
        # It would wait for ever.
        again = Thread(target=lambda: found.append(part.read(torch.arange(500))), daemon=True)
        again.start()
        again.join(60)
    np.testing.assert_array_equal(found[0].ids.numpy(), arrays["ids"])
