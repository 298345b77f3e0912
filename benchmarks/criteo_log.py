"""Synthetic clicks written as a raw log in Criteo's layout.

python benchmarks/criteo_log.py 1000000 /tmp/clicks.tsv
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import torch
from tqdm import tqdm

from stampede.data import SyntheticClicks

_CHUNK = 1 << 18
_MISSING = 0.1
_HEX = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)


def write_criteo_log(path: Path, rows: int, seed: int = 0) -> None:
    """Write a log: label, 13 whole numbers, 26 ids of 8 hexadecimal digits; some are missing.

    Ids have Criteo Kaggle's cardinalities and a Zipf distribution of exponent 1.2.
    """
    clicks = SyntheticClicks(seed=seed, scale=1.0).dataset(rows, 100).train
    with path.open("wb") as file:
        for start in tqdm(range(0, rows, _CHUNK), desc="writing the log", mininterval=10):
            numbers = torch.arange(start, min(start + _CHUNK, rows))
            read = clicks.read(numbers)
            draw = np.random.default_rng([seed, start])
            columns = {"label": read.label.numpy().astype(np.int8)}
            for i, values in enumerate(read.dense.numpy().T):
                whole = (values * 10.0 ** (i % 4 + 1)).astype(np.int64)
                columns[f"I{i + 1}"] = _with_missing(pl.Series(whole), draw, i)
            for i, ids in enumerate(read.ids.numpy().T):
                columns[f"C{i + 1}"] = _with_missing(_hex(ids, i), draw, i)
            frame = pl.DataFrame(columns)
            frame.write_csv(file, separator="\t", include_header=False, null_value="")


def _with_missing(values: pl.Series, draw: np.random.Generator, column: int) -> pl.Series:
    if column % 3:
        return values
    return values.set(pl.Series(draw.random(len(values)) < _MISSING), None)


def _hex(ids: np.ndarray, field: int) -> pl.Series:
    """Eight digits for an id, other ones in every field."""
    mixed = (ids.astype(np.uint64) * 2654435761 + field * 40503) & 0xFFFFFFFF
    shifts = np.arange(28, -1, -4, dtype=np.uint64)
    digits = _HEX[((mixed[:, None] >> shifts) & 15).astype(np.uint8)]
    offsets = np.arange(0, 8 * len(ids) + 1, 8, dtype=np.int32)
    text = pa.StringArray.from_buffers(len(ids), pa.py_buffer(offsets), pa.py_buffer(digits))
    return pl.from_arrow(text)


if __name__ == "__main__":
    write_criteo_log(Path(sys.argv[2]), int(sys.argv[1]))
