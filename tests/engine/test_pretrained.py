"""Embeddings that begin with vectors of a file."""

import numpy as np
import polars as pl
import pytest
import torch

from stampede import open_run
from stampede.data import DataError
from stampede.engine.checkpoint.retention import newest
from stampede.engine.errors import RunFolderError
from stampede.engine.inference import export_command as export
from stampede.engine.processes import processes
from stampede.settings import SettingsError
from support.jobs import tensors_of
from support.packages import loaded
from support.periods import period, train, write_frames
from support.ranks import run_ranks
from support.shop import SHOP, shop, train_on_shop, write_shop
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


def frozen_options(folder):
    frozen = f"model.pretrained={{item: {{path: {folder}/vectors.parquet, train: false}}}}"
    return [f"model.dim={WIDTH}", "model.name=deepfm", frozen]


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


def item_table(path, prefix="model."):
    (name,) = [n for n in tensors_of(path) if n.startswith(prefix) and n.endswith("t_item.weight")]
    return tensors_of(path)[name]


@pytest.mark.slow
def test_a_frozen_table_stays_and_has_no_moments(folder, tmp_path):
    began, told, _ = begun(folder, frozen_options(folder), "frozen")
    before = item_table(began)
    ids = pl.read_parquet(next(folder.glob("cache/*/learned")) / "item.parquet")["value"].to_list()
    given = dict(pl.read_parquet(folder / "vectors.parquet").iter_rows())
    for row, text in enumerate([None, None, *ids]):
        expected = given.get(text, [0.0] * WIDTH) + [0.0] * WIDTH
        assert before[row].tolist() == pytest.approx(expected)
    (said,) = [line for line in told if "pretrained" in line]
    assert "without one are zeros; training leaves them all as they are" in said
    run = train_on_shop(folder, *frozen_options(folder), "optim.embedding.l2=1e-3")
    trained = newest(run / "checkpoints")
    assert torch.equal(item_table(trained), before)
    tensors = tensors_of(trained)
    moments = {n.rpartition(".")[2] for n in tensors if n.startswith("fused.") and "t_item" in n}
    assert moments == {"step"}
    users = [n for n in tensors if n.startswith("fused.") and "t_user" in n]
    assert len(users) == 3
    frame = shop(40, seed=8).drop(columns="clicked").astype(str)
    columns = {name: frame[name].tolist() for name in frame}
    assert export.main([str(run), str(tmp_path / "package")]) == 0
    found = loaded(tmp_path / "package").score(columns)
    assert found == pytest.approx(open_run(run).score(frame), abs=1e-6) and found.std() > 0.02
    thawed = [f"model.pretrained={{item: {folder}/vectors.parquet}}", "checkpoint.resume=auto"]
    with pytest.raises(RunFolderError, match=r"model\.pretrained\.item\.train"):
        train_on_shop(folder, *frozen_options(folder), *thawed)
    everything = [f"checkpoint.init_from={run}", "checkpoint.init_state=all", "run.name=next"]
    with pytest.raises(RunFolderError, match=r"pretrained\.item\.train was False, now True"):
        begun(folder, [*frozen_options(folder), thawed[0], *everything], "thawed")
    begun(folder, [*frozen_options(folder), *everything], "as before")


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_weights_of_another_run_and_vectors(folder, tmp_path, frozen):
    """Learned rows win in a table that is trained, vectors and zeros in a frozen one."""
    first = write_shop(tmp_path / "first", frame=shop(seed=3, first_item=15))
    source = train_on_shop(first, f"model.dim={WIDTH}", "model.name=deepfm")
    learned = item_table(newest(source / "checkpoints"))
    known = pl.read_parquet(source / "inputs/learned/item.parquet")["value"].to_list()
    known = dict(zip([None, "rare", *known], learned, strict=True))
    how = frozen_options(folder) if frozen else [*options(folder), "model.name=deepfm"]
    given = dict(pl.read_parquet(folder / "vectors.parquet").iter_rows())
    ids = pl.read_parquet(next(folder.glob("cache/*/learned")) / "item.parquet")["value"].to_list()
    both, only_new = set(ids) & set(known) & set(given), set(ids) & set(given) - set(known)
    assert both and only_new and set(ids) & set(known) - set(given)
    more = [f"checkpoint.init_from={source}", "run.name=next"]
    path, told, _ = begun(folder, [*how, *more], f"warm {frozen}")
    found = item_table(path)
    for row, text in enumerate([None, "rare", *ids]):
        if frozen:
            expected = given.get(text, [0.0] * WIDTH) + [0.0] * WIDTH
        elif text in known:
            expected = known[text].tolist()
        elif text in given:
            expected = [*given[text], *found[row, WIDTH:].tolist()]
        else:
            continue
        assert found[row].tolist() == pytest.approx(expected)
    (said,) = [line for line in told if "pretrained" in line]
    count = len(set(ids) & set(given))
    assert f"item: {count} of {len(ids) + 2} rows begin with a vector" in said
    assert ("are zeros" if frozen else "loaded from checkpoint.init_from replace both") in said


@pytest.mark.slow
def test_new_ids_of_a_period_get_their_vectors(tmp_path):
    draw = np.random.default_rng(1)
    ids = [f"i{n}" for n in range(0, 90, 2)]
    vectors = dict(zip(ids, draw.standard_normal((len(ids), 4)).astype(np.float32), strict=True))
    frame = pl.DataFrame({"id": ids, "vector": list(vectors.values())})
    frame.write_parquet(tmp_path / "vectors.parquet")
    frames = [shop(300, first, seed=number) for number, first in enumerate((0, 20), 1)]
    frozen = f"model.pretrained={{item: {{path: {tmp_path}/vectors.parquet, train: false}}}}"
    train(write_frames(tmp_path, SHOP, frames), ["checkpoint.keep=9", frozen])
    known = []
    for number in (1, 2):
        run = period(tmp_path, number)
        rows = pl.read_parquet(run / "inputs/learned/item.parquet")["value"].to_list()
        table = item_table(newest(run / "checkpoints"))[:, :4]
        known.append(len(rows))
        for row, text in enumerate([None, None, *rows]):
            assert table[row].tolist() == pytest.approx(vectors.get(text, np.zeros(4)).tolist())
    assert known[1] > known[0]


@pytest.mark.slow
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
    # Numbers of its rows would look like ids.
    pl.DataFrame({"id": [1, 2], "vector": [[1.0] * WIDTH] * 2}).write_parquet(folder / "t.parquet")
    with pytest.raises(DataError, match=r"'town' has encode: hash, .* write encode: vocabulary"):
        begun(folder, options(folder, "town", "t.parquet"), "bad")
    with pytest.raises(DataError, match=r"nothing.parquet: cannot be read as Parquet"):
        begun(folder, options(folder, file="nothing.parquet"), "bad")
