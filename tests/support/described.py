"""A log to describe."""

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from stampede.data.description.statistics import collect, read_rows
from stampede.data.options import Split
from stampede.data.raw.rows import BadRows
from stampede.data.sources import open_source

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
        rows = read_rows(source, BadRows("error"), limit, Path(spool))
        return collect(rows), rows.frame.select("#part").collect()["#part"].to_numpy()
