"""A log to prepare."""

import numpy as np
import pandas as pd
import pytest

from support.preparing import IDS, NUMBERS


@pytest.fixture(scope="session")
def made_up():
    """A log in Criteo's layout with missing values, rare ids and negative numbers."""
    draw = np.random.default_rng(0)
    rows = 3000
    frame = pd.DataFrame({"label": draw.integers(0, 2, rows)})
    for i, name in enumerate(NUMBERS):
        values = pd.Series(draw.integers(-3, 10 ** (i % 5 + 1), rows)).astype("Int64")
        frame[name] = values.mask(draw.random(rows) < 0.3)
    for i, name in enumerate(IDS):
        ids = pd.Series(draw.zipf(1.3, rows) % (3 + 50 * i)).map("{:08x}".format)
        frame[name] = ids.mask(draw.random(rows) < (0.2 if i % 2 else 0.0))
    return frame
