"""Prepared data sets written from arrays, without the code that prepares."""

from pathlib import Path

import numpy as np

from stampede.data.prepared.manifest import MANIFEST, FieldEntry, Manifest, ShardEntry
from stampede.data.prepared.verify import record_verified
from stampede.files import file_entry


def write_prepared(folder: Path, parts, fields, shard_rows=None, **described) -> Path:
    """Write a prepared folder.

    Args:
        parts: by name, arrays by the names of the manifest; the offsets are those of the whole
            part.
        fields: `{name: (rows of its table, multi, more)}`, single-valued ones first; `more` of a
            `FieldEntry` may be left out.
        shard_rows: rows of a shard; default: one shard.
        described: more of the manifest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    some = parts["train"]
    manifest = Manifest(
        version="0",
        fields=[
            FieldEntry(name=name, rows=rows, missing_row=0, multi=multi, **dict(*more))
            for name, (rows, multi, *more) in fields.items()
        ],
        numbers=[f"I{i + 1}" for i in range(some["numbers"].shape[1])],
        ids_dtype=str(some["ids"].dtype),
        numbers_dtype=str(some["numbers"].dtype),
        has_weight="weight" in some,
        has_time="time" in some,
        parts={name: write_part(folder, name, arrays, shard_rows) for name, arrays in
               parts.items()},
        **described,
    )  # fmt: skip
    (folder / MANIFEST).write_text(manifest.model_dump_json())
    record_verified(folder)
    return folder


def write_part(folder, part, arrays, shard_rows):
    rows = len(arrays["label"])
    starts = range(0, rows, shard_rows or max(rows, 1))
    shards = []
    for number, start in enumerate(starts):
        stop = min(rows, start + (shard_rows or rows))
        files = {}
        for name, array in shard_of(arrays, start, stop).items():
            path = folder / f"{part}-{number}-{name}.npy"
            np.save(path, array)
            files[name] = file_entry(path, folder)
        shards.append(ShardEntry(rows=stop - start, files=files))
    return shards


def shard_of(arrays, start, stop):
    """The arrays of some rows; offsets begin at 0 again."""
    shard = {}
    for name, array in arrays.items():
        if name.startswith("offsets_"):
            shard[name] = array[start : stop + 1] - array[start]
        elif name.startswith(("values_", "weights_")):
            offsets = arrays[f"offsets_{name.split('_')[1]}"]
            shard[name] = array[offsets[start] : offsets[stop]]
        else:
            shard[name] = array[start:stop]
    return shard


def drawn_rows(rows, single=3, numbers=2, multi=0, weight=False, vocabulary=50, seed=0):
    """Arrays of a part with a truth worth learning; `numbers[:, 0]` is the row's own number."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(0, vocabulary, (rows, single), dtype=np.int32)
    dense = draw.random((rows, numbers), dtype=np.float32)
    if numbers:
        dense[:, 0] = np.arange(rows)
    arrays = {
        "ids": ids,
        "numbers": dense,
        "label": (draw.random(rows) < 0.2 + 0.6 * (ids.sum(1) % 2)).astype(np.uint8),
    }
    if weight:
        arrays["weight"] = draw.integers(0, 4, rows).astype(np.float32) / 2
    for i in range(multi):
        lengths = draw.integers(0, 4, rows)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        arrays[f"offsets_{i}"] = offsets
        arrays[f"values_{i}"] = draw.integers(0, vocabulary, offsets[-1], dtype=np.int32)
    return arrays


def drawn_fields(single=3, multi=0, vocabulary=50):
    """Fields that fit `drawn_rows`."""
    names = [f"C{i + 1}" for i in range(single)] + [f"M{i + 1}" for i in range(multi)]
    return {name: (vocabulary, name.startswith("M")) for name in names}


def write_small(folder):
    """A folder with two multi-valued fields and weights, its training part in three shards."""
    parts = {
        "train": drawn_rows(50, multi=2, weight=True),
        "validation": drawn_rows(7, multi=2, weight=True, seed=1),
        "test": drawn_rows(20, multi=2, weight=True, seed=2),
    }
    return write_prepared(folder, parts, drawn_fields(multi=2), shard_rows=20)
