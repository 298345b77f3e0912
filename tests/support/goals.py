"""A log with two goals, weights and missing labels, and small jobs on it."""

import numpy as np
import pandas as pd

from stampede.engine.config.load import load_config

SCHEMA = """
label: {click: clicked, buy: {column: price_paid, at_least: 10}}
ids: [user, item]
numbers: {x: {transform: [], bins: 0}}
weight: importance
"""

JOB = (
    "preset=paper", "data.kind=table", "data.split=random", "data.test_fraction=0.2",
    "data.validation_fraction=0.1", "model.name=mmoe", "model.dim=4", "model.hidden=[8,6]",
    "model.options.tower=[5]", "train.epochs=1", "train.batch_size=64", "train.log_every=2",
    "evaluate.batch_size=128", "optim.embedding.lr=1e-2", "optim.dense.lr=1e-2",
)  # fmt: skip


def goal_log(rows=1000, seed=0):
    """Clicks, and among them rarer purchases; a fifth of the purchases is not known."""
    draw = np.random.default_rng(seed)
    users, items = draw.integers(0, 30, rows), draw.integers(0, 20, rows)
    of_user, of_item = draw.normal(size=30), draw.normal(size=20)
    clicked = draw.random(rows) < 1 / (1 + np.exp(-of_user[users] - of_item[items]))
    bought = clicked & (draw.random(rows) < 1 / (1 + np.exp(1 - of_item[items])))
    paid = np.where(bought, draw.integers(10, 90, rows), draw.integers(0, 10, rows)).astype(float)
    paid[draw.random(rows) < 0.2] = np.nan
    return pd.DataFrame(
        {
            "clicked": clicked.astype(int),
            "price_paid": paid,
            "user": [f"u{user}" for user in users],
            "item": [f"i{item}" for item in items],
            "x": draw.random(rows).round(3),
            "importance": draw.integers(1, 4, rows) / 2,
        }
    )


def write_goals(folder, frame=None, schema=SCHEMA):
    """What a run needs in its folder."""
    folder.mkdir(exist_ok=True)
    (goal_log() if frame is None else frame).to_csv(folder / "log.csv", index=False)
    (folder / "schema.yaml").write_text(schema)
    return folder


def goal_config(folder, *overrides, world_size=1):
    """A configuration that trains on the log in a folder in a second."""
    path = folder / "goals.yaml"
    path.write_text("")
    own = [
        f"run.dir={folder}", f"data.path={folder / 'log.csv'}", f"data.cache={folder / 'cache'}",
        f"data.schema_file={folder / 'schema.yaml'}",
    ]  # fmt: skip
    return load_config(path, [*own, *JOB, *overrides], world_size)
