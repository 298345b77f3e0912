"""Runs with histories that a query attends to: every place where they are read, stored and scored."""

import json
from itertools import pairwise

import numpy as np
import onnxruntime
import pandas as pd
import polars as pl
import pytest
import torch

from stampede import open_run
from stampede.engine import export
from stampede.engine.checkpoint.manifest import read_manifest
from stampede.engine.checkpoint.retention import newest
from stampede.engine.config.load import load_config
from stampede.engine.planning.dry_run import dry_run
from stampede.engine.planning.planner import Cluster
from support.jobs import lines, tensors_of
from support.packages import loaded, logits_alone
from support.periods import period, train
from support.shop import SHOP, shop, train_on_shop, write_shop
from support.warm_starts import begun

ATTENDS = SHOP.replace("pooling: mean", "pooling: attention, query: item").replace(
    "{separator: json, share: town}", "{separator: json, pooling: attention, query: town}"
)
OPTIONS = ["model.attention.hidden=[6]", "train.epochs=2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_on_shop(write_shop(tmp_path_factory.mktemp("shop"), ATTENDS), *OPTIONS)


@pytest.fixture(scope="module")
def rows_to_score():
    frame = shop(40, seed=8).drop(columns="clicked").astype(str)
    frame.loc[0, ["item", "history", "last", "towns"]] = ["new", "i1|new|i0|i2|i3|i4", "new", ""]
    frame.loc[1, ["history", "towns"]] = ["", "[]"]
    return frame


def test_a_run_has_each_table_once(trained):
    manifest = read_manifest(newest(trained / "checkpoints"))
    assert [table.field for table in manifest.tables.values()] == ["user", "item", "town", "towns"]
    assert manifest.data.attention == {"history": "item", "towns": "town"}
    kept = {name for name in manifest.tensors if name.startswith("model.front.")}
    assert kept == {
        "model.front.ebc.embedding_bags.t_user.weight",
        "model.front.ebc.embedding_bags.t_town.weight",
        "model.front.ec.embeddings.t_item.weight",
        "model.front.ec.embeddings.t_towns.weight",
    }


def test_empty_cells_stay_empty(trained):
    frame = pd.read_csv(trained.parent / "log.csv", dtype=str, keep_default_na=False)[:432]
    cells = frame["history"].str.split("|")
    expected = [min(len(cell), 4) if cell != [""] else 0 for cell in cells]
    shard = next(trained.parent.glob("cache/*/"))
    found = np.concatenate([np.diff(np.load(one)) for one in sorted(shard.glob("train*offsets_0*"))])
    assert found.tolist() == expected and 0 in expected


def test_packages_score_as_the_run(trained, rows_to_score, tmp_path):
    expected = open_run(trained).score(rows_to_score)
    assert expected.std() > 0.02
    assert export.main([str(trained), str(tmp_path / "package")]) == 0
    columns = {name: rows_to_score[name].tolist() for name in rows_to_score}
    (found,) = logits_alone(tmp_path / "package", [columns], tmp_path)
    np.testing.assert_allclose(1 / (1 + np.exp(-np.array(found))), expected, atol=1e-6)
    model = loaded(tmp_path / "package")
    one_by_one = [model.score({n: [v[i]] for n, v in columns.items()})[0] for i in range(40)]
    np.testing.assert_allclose(one_by_one, expected, atol=1e-6)
