"""Sorting with less memory than there are records."""

import resource
import tracemalloc

import numpy as np
import pytest

from stampede.engine.metrics.external_sort import CHUNK, PEAK_BYTES, ExternalSort


def drawn(columns, rows, kinds):
    """Records of so many different ones."""
    draw = np.random.default_rng(rows)
    records = draw.integers(0, 2**64 - 1, (columns, kinds), dtype=np.uint64)
    # Many groups with several records each.
    records[:-1] %= np.uint64(max(1, kinds // 5))
    return records[:, draw.integers(0, kinds, rows)]


def sort(records, capacity, folder, pieces=7):
    whole = ExternalSort(len(records), capacity, folder)
    for piece in np.array_split(records, pieces, axis=1):
        whole.add(piece)
    return list(whole.sorted())


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("kinds", [1, 2, 50, 100_000])
@pytest.mark.parametrize("capacity, rows", [(1, 40), (37, 1500), (1000, 9000), (9000, 9000)])
def test_records_are_sorted(tmp_path, columns, kinds, capacity, rows):
    records = drawn(columns, rows, kinds)
    found = sort(records, capacity, tmp_path)
    expected = records[:, np.lexsort(records[::-1])]
    assert np.array_equal(np.concatenate(found, 1), expected)
    assert all(0 < chunk.shape[1] <= CHUNK for chunk in found)


def test_nothing_to_sort(tmp_path):
    assert sort(np.empty((2, 0), np.uint64), 10, tmp_path) == []


def test_chunks_are_short():
    found = sort(drawn(1, 2 * CHUNK + 5, 1000), 3 * CHUNK, None)
    assert [chunk.shape[1] for chunk in found] == [CHUNK, CHUNK, 5]


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("kinds", [1, 1_000_000])
def test_memory_stays_within_the_budget(tmp_path, columns, kinds):
    capacity, rows = 300_000, 1_000_000
    draw = np.random.default_rng(0)
    tracemalloc.start()
    try:
        whole = ExternalSort(columns, capacity, tmp_path)
        for _ in range(100):
            whole.add(draw.integers(0, kinds, (columns, rows // 100), dtype=np.uint64))
        taken = sum(chunk.shape[1] for chunk in whole.sorted())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert taken == rows
    # The index of the runs, and the records that are being added.
    assert peak < capacity * PEAK_BYTES[columns] + 1e6


def test_nothing_is_left_in_the_folder(tmp_path):
    whole = ExternalSort(1, 10, tmp_path)
    whole.add(drawn(1, 1000, 1000))
    # Not even while it is sorted: a process that is killed cleans nothing up.
    assert list(tmp_path.iterdir()) == []
    next(whole.sorted())
    assert list(tmp_path.iterdir()) == []
    whole.close()


def test_a_full_disk_is_an_error(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            sort(drawn(1, 50_000, 1000), 5_000, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_was_cut_short_is_an_error(tmp_path):
    whole = ExternalSort(1, 100, tmp_path)
    whole.add(drawn(1, 1000, 1000))
    whole._file.truncate(100)
    with pytest.raises(OSError, match="cut short"):
        list(whole.sorted())
