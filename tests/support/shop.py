"""A made-up shop's log, in which fields share tables, and its schema."""

import json

import numpy as np
import pandas as pd

from support.movie_runs import train_on_movies

SHOP = """
label: clicked
ids:
  user: {min_count: 1}
  item: {min_count: 3}
  history: {separator: "|", max_ids: 4, keep: last, share: item, pooling: mean}
  last: {share: item}
  town: {encode: hash, buckets: 9, seed: 3}
  towns: {separator: json, share: town}
numbers:
  price: {transform: [standard], bins: 0}
"""


def shop(rows=600, first_item=0, seed=5):
    """Rows with items `i<first_item>` and on; some cells are empty."""
    draw = np.random.default_rng(seed)

    def items(count):
        return [f"i{first_item + item}" for item in draw.zipf(1.4, count) % 60]

    histories = [items(count) for count in draw.integers(0, 7, rows)]
    towns = [[f"t{town}" for town in draw.integers(0, 15, n)] for n in draw.integers(0, 4, rows)]
    frame = pd.DataFrame(
        {
            "user": [f"u{user}" for user in draw.integers(0, 40, rows)],
            "item": items(rows),
            "history": ["|".join(cell) for cell in histories],
            "last": [cell[-1] if cell else "" for cell in histories],
            "town": [cell[0] if cell else "" for cell in towns],
            "towns": [json.dumps(cell) for cell in towns],
            "price": draw.random(rows).round(3),
        }
    )
    known = [item in cell for item, cell in zip(frame["item"], histories, strict=True)]
    frame.insert(0, "clicked", (draw.random(rows) < 0.2 + 0.6 * np.array(known)).astype(int))
    return frame


def write_shop(folder, schema=SHOP, frame=None):
    """What a run needs in its folder."""
    folder.mkdir(exist_ok=True)
    (shop() if frame is None else frame).to_csv(folder / "log.csv", index=False)
    (folder / "schema.yaml").write_text(schema)
    (folder / "movies.yaml").write_text("")
    return folder


def train_on_shop(folder, *overrides, **options):
    """A whole run; its folder."""
    return train_on_movies(folder, "optim.dense.lr=0.02", *overrides, **options)
