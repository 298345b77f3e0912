"""A log to describe."""

import numpy as np
import pandas as pd
import pytest

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


@pytest.fixture
def log(tmp_path):
    """Three files of one log, and the whole of it; each file is read as a chunk of its own."""
    frame = made_up(3000)
    for i in range(3):
        frame[i * 1000 : (i + 1) * 1000].to_csv(tmp_path / f"log_{i}.csv", index=False)
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    return tmp_path, frame
