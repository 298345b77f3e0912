"""Embeddings that begin with vectors of a file."""

import numpy as np
import polars as pl
import pytest
import torch

from stampede.data import DataError
from stampede.engine.processes import processes
from stampede.settings import SettingsError
from support.jobs import tensors_of
from support.ranks import run_ranks
from support.shop import SHOP, write_shop
from support.warm_starts import begun, begun_in

WIDTH = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_shop(tmp_path_factory.mktemp("shop"), SHOP)
    draw = np.random.default_rng(0)
    ids = [*(f"i{n}" for n in range(1, 30)), "no such item"]
    vectors = draw.standard_normal((len(ids), WIDTH)).astype(np.float32)
    pl.DataFrame({"id": ids, "vector": vectors}).write_parquet(folder / "vectors.parquet")
    return folder


def options(folder, field="item", file="vectors.parquet"):
    return [f"model.pretrained={{{field}: {folder}/{file}}}", f"model.dim={WIDTH}"]


def began_on_two(folder):
    with processes("cpu") as here:
        begun_in(here, folder, [*options(folder), "sharding.plan=column_wise"], "two")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rows_begin_with_their_vectors(folder, ranks):
    plain, *_ = begun(folder, [f"model.dim={WIDTH}"], "plain")
    if ranks == 1:
        path, lines, _ = begun(folder, options(folder), "one")
    else:
        run_ranks(2, began_on_two, folder)
        path, lines = next((folder / "two").iterdir()), None
    (name,) = [n for n in tensors_of(path) if n.startswith("model.") and "t_item" in n]
    found, before = tensors_of(path)[name], tensors_of(plain)[name]
    ids = pl.read_parquet(next(folder.glob("cache/*/learned")) / "item.parquet")["value"].to_list()
    given = dict(pl.read_parquet(folder / "vectors.parquet").iter_rows())
    for row, text in enumerate([None, None, *ids]):
        if text in given:
            assert found[row, :WIDTH].tolist() == pytest.approx(given[text])
            assert torch.equal(found[row, WIDTH:], before[row, WIDTH:])
        else:
            assert torch.equal(found[row], before[row])
    have = len(set(ids) & set(given))
    assert 5 < have < len(ids) + 2
    if lines is not None:
        (said,) = [line for line in lines if "pretrained" in line]
        assert f"item: {have} of {len(ids) + 2} rows begin with a vector of" in said


def test_what_cannot_be_used(folder):
    for field, said in (
        ("itm", "'itm' is no id field; write one of"),
        ("history", "uses the table of item"),
    ):
        with pytest.raises(SettingsError, match=said):
            begun(folder, options(folder, field), "bad")
    wide = {"id": ["i1", "i2"], "vector": [[1.0] * WIDTH, [1.0] * 3]}
    for content, said in (
        (wide, "row 2, column vector: found a vector of 3 numbers, but embeddings of item have 4;"),
        ({"id": ["i1", "i1"], "vector": [[1.0] * WIDTH] * 2}, "column id: found 'i1' twice; write"),
        (
            {"id": ["i1", "i2"], "vector": [[1.0] * 4, None]},
            "row 2, column vector: found no vector",
        ),
        ({"id": ["i1"], "vector": [["a"] * 4]}, "found lists of String; write lists of numbers"),
        ({"id": ["i1"]}, "found the columns id; write two, ids and lists of numbers"),
        ({"id": ["x"], "vector": [[1.0] * WIDTH]}, "none of its 1 ids is one of the field 'item'"),
    ):
        pl.DataFrame(content).write_parquet(folder / "bad.parquet")
        with pytest.raises(DataError, match=said):
            begun(folder, options(folder, file="bad.parquet"), "bad")
    with pytest.raises(DataError, match=r"nothing.parquet: cannot be read as Parquet"):
        begun(folder, options(folder, file="nothing.parquet"), "bad")
