"""Speed of the reader against plain numpy gathering of the same rows, in one process.

Files are like Criteo's, 26 ids and 13 numbers a row, in the page cache; batches of 65536 in the
order of a global shuffle, ready to train on. Two readers also have weights, and one of these a
field with up to three ids. numpy only gathers the same rows of the same arrays. The epochs of all
readers take turns, so that other load affects all alike.

    python benchmarks/reading.py
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path

import numpy as np
from report import begin
from timing import interleaved, seconds_of

from stampede.data import GlobalBatches, Order
from stampede.data.prepared.reader import ShardedPart, open_prepared
from support.prepared import drawn_fields, drawn_rows, write_prepared

ROWS, EPOCHS = (2_000_000, 16_000_000), 5
BATCH = 65536
FIELDS, NUMBERS = 26, 13
ARRAYS = ("ids", "numbers", "label")


def main() -> None:
    options, report = begin("reading", __doc__)
    found = {}
    for rows in (100_000,) if options.quick else ROWS:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            found[str(rows)] = measure(Path(folder), rows, EPOCHS)
        report.add(batch_size=BATCH, samples_per_second=found)
        print_speeds(rows, found[str(rows)])
    report.close()


def measure(folder: Path, rows: int, epochs: int) -> dict[str, float]:
    """Samples/s of each reader: the median of its epochs after the first."""
    arrays = drawn_rows(rows, FIELDS, NUMBERS, vocabulary=1_000_000)
    some = drawn_rows(10, FIELDS, NUMBERS)
    fields = drawn_fields(FIELDS, vocabulary=1_000_000)
    for name, shard_rows in (("one", None), ("eight", rows // 8 + 1)):
        write_prepared(folder / name, {"train": arrays, "test": some}, fields, shard_rows)
    del arrays
    extra = {"weights": 0, "weights and bags": 1}
    for name, bags in extra.items():
        write_prepared(
            folder / name,
            {
                part: drawn_rows(
                    many, FIELDS, NUMBERS, multi=bags, weight=True, vocabulary=1_000_000
                )
                for part, many in (("train", rows), ("test", 10))
            },
            drawn_fields(FIELDS, multi=bags, vocabulary=1_000_000),
        )
    one, eight, weighted, bagged = (
        open_prepared(folder / name).train for name in ("one", "eight", *extra)
    )
    readers = {
        "reader": loader(one, "global"),
        "reader, 8 shards": loader(eight, "global"),
        "reader, block shuffle": loader(one, "block"),
        "reader, global shuffle, read ahead": loader(one, "global", ahead=2),
        "reader, weights": loader(weighted, "global"),
        "reader, weights and bags": loader(bagged, "global", bags=1),
        "numpy take": numpy_loader(one, lambda array, chosen: array.take(chosen, 0)),
        "numpy fancy indexing": numpy_loader(one, lambda array, chosen: array[chosen]),
    }
    seconds = interleaved({name: _epochs(read) for name, read in readers.items()}, epochs)
    return {name: rows / statistics.median(times) for name, times in seconds.items()}


def _epochs(read_epoch: Callable[[int], None]) -> Callable[[], float]:
    """A function that reads the next epoch at each call."""
    numbers = count()
    return lambda: seconds_of(lambda: read_epoch(next(numbers)))


def loader(part: ShardedPart, shuffle: str, ahead: int = 0, bags: int = 0) -> Callable[[int], None]:
    """Reads an epoch batch by batch, as training does."""
    window = 32 * Order(part.rows).block_rows if shuffle == "block" else 0
    order = Order(part.rows, shuffle, 0, window)
    fields = list(drawn_fields(FIELDS, multi=bags))
    batches = GlobalBatches(part, fields, BATCH, 0, 1, order, ahead=ahead)

    def read_epoch(epoch: int) -> None:
        for batch in batches.epoch(epoch):
            del batch

    return read_epoch


def numpy_loader(part: ShardedPart, gather: Callable) -> Callable[[int], None]:
    """Gathers the rows of an epoch, drawn beforehand."""
    maps = [np.asarray(part.shards[0].maps[name]) for name in ARRAYS]
    order = np.random.default_rng(0).permutation(part.rows)
    edges = [*range(0, part.rows, BATCH), part.rows]

    def read_epoch(epoch: int) -> None:
        for start, stop in pairwise(edges):
            gathered = [gather(array, order[start:stop]) for array in maps]
            del gathered

    return read_epoch


def print_speeds(rows: int, found: dict[str, float]) -> None:
    """One line a reader."""
    size = rows * (4 * FIELDS + 4 * NUMBERS + 1)
    print(f"{rows:,} rows, {size / 1e9:.1f} GB")
    for name, speed in found.items():
        share = speed / found["numpy take"]
        print(f"  {name:<36}{speed / 1e6:>6.1f} M samples/s, {share:.2f} of numpy take's speed")


if __name__ == "__main__":
    main()
