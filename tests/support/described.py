"""Logs and prepared folders to describe."""

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from stampede.data.description.rows import prepared_rows, raw_rows
from stampede.data.description.statistics import collect
from stampede.data.options import Split
from stampede.data.raw.rows import BadRows
from stampede.data.sources import open_source
from support.prepared import write_prepared

SCHEMA = """
label: clicked
ids:
  site:
  user: {encode: hash, buckets: 7}
  tags: {separator: "|"}
numbers: {price: {}}
time: {column: seen}
"""


def made_up(rows):
    """A log with missing values, rare ids, cells of several ids, and a label rate that rises."""
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"clicked": (draw.random(rows) < np.linspace(0.1, 0.5, rows)).astype(int)})
    frame["site"] = pd.Series(draw.zipf(1.5, rows) % 300).map("s{}".format)
    frame["site"] = frame["site"].mask(draw.random(rows) < 0.1)
    frame["user"] = pd.Series(draw.integers(0, rows, rows)).map("u{}".format)
    tags = [[f"t{tag}" for tag in draw.integers(0, 60, draw.integers(0, 4))] for _ in range(rows)]
    frame["tags"] = ["|".join(cell) for cell in tags]
    frame["price"] = np.round(draw.lognormal(2, 1.5, rows), 3)
    frame["price"] = frame["price"].mask(draw.random(rows) < 0.2)
    frame["seen"] = 1_600_000_000 + np.sort(draw.integers(0, 40 * 3600, rows))
    return frame


def described(folder, limit=None, **split):
    """Statistics of the log in a folder, and the part of each row."""
    source = open_source(
        "table",
        str(folder / "log_*.csv"),
        Split.model_validate(split),
        schema=str(folder / "schema.yaml"),
        features="paper",
    )
    with tempfile.TemporaryDirectory() as spool:
        rows = raw_rows(source, BadRows("error"), limit, Path(spool))
        return collect(rows), rows.frame.select("#part").collect()["#part"].to_numpy()


def described_folder(folder, limit=None):
    """Statistics of a prepared folder."""
    with tempfile.TemporaryDirectory() as spool:
        return collect(prepared_rows(folder, limit, Path(spool)))


def prepared(folder, rows=500, **described):
    """Two fields, the first with an unseen row, and one of several ids; row 0 is missing."""
    draw = np.random.default_rng(3)
    parts = {}
    for part, offset in (("train", 0), ("validation", 10), ("test", 20)):
        lengths = draw.integers(0, 4, rows)
        parts[part] = {
            "ids": draw.integers(0, 30 + offset, (rows, 2), dtype=np.int32),
            "numbers": draw.random((rows, 1), dtype=np.float32),
            "label": draw.integers(0, 2, rows).astype(np.uint8),
            "offsets_0": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            "values_0": draw.integers(0, 40 + offset, lengths.sum(), dtype=np.int32),
        }
    fields = {"a": (60, False), "b": (60, False), "many": (60, True)}
    write_prepared(folder, parts, fields, shard_rows=200, **described)
    manifest = (folder / "manifest.json").read_text()
    entry = '"name":"a","rows":60,"missing_row":0,"unseen_row":null'
    assert entry in manifest
    (folder / "manifest.json").write_text(manifest.replace(entry, entry[:-4] + "1"))
    return parts
