"""Runs whose fields share tables: every place where tables are counted, stored, and looked up."""

from itertools import pairwise

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch

from stampede import DataError, open_run
from stampede.engine.checkpoint.manifest import read_manifest
from stampede.engine.checkpoint.retention import newest
from stampede.engine.config.load import load_config
from stampede.engine.inference import export_command as export
from stampede.engine.inference.package import update
from stampede.engine.planning.dry_run import dry_run
from stampede.engine.planning.planner import Cluster
from stampede.settings import SettingsError
from support.jobs import lines, tensors_of
from support.packages import loaded
from support.periods import period, train, write_frames
from support.planning import gpus, planned_config
from support.predicting import run_command
from support.shop import SHOP, shop, train_on_shop, write_shop
from support.warm_starts import begun, weights_name

TABLES = ["user", "item", "town"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = write_shop(tmp_path_factory.mktemp("shop"))
    return train_on_shop(folder, "train.epochs=2")


@pytest.fixture(scope="module")
def rows_to_score():
    frame = shop(40, seed=8).drop(columns="clicked").astype(str)
    frame.loc[0, ["item", "history", "last", "towns"]] = ["new", "i1|new|i0|i2|i3|i4", "new", ""]
    return frame


@pytest.mark.slow
def test_a_run_has_each_table_once(trained):
    manifest = read_manifest(newest(trained / "checkpoints"))
    assert [table.field for table in manifest.tables.values()] == TABLES
    assert manifest.data.shared == {"last": "item", "history": "item", "towns": "town"}
    weights = {name for name in manifest.tensors if name.startswith("model.front.")}
    assert weights == {weights_name(name) for name in TABLES}
    run = open_run(trained)
    item = run.embeddings("item")
    assert run.fields["history"] == run.fields["last"] == len(item)
    assert item.index[2:].is_unique and "i1" in item.index
    pd.testing.assert_frame_equal(run.embeddings("history").rename_axis("item"), item)
    kept = [path.name for path in (trained / "inputs/learned").glob("*.parquet")]
    assert sorted(kept) == ["item.parquet", "user.parquet"]


@pytest.mark.slow
def test_a_cell_that_is_no_json_list_is_refused_in_scoring(trained, rows_to_score, tmp_path):
    frame = rows_to_score.assign(towns="a|b")
    with pytest.raises(DataError, match=r"column towns: .*write a JSON list"):
        open_run(trained).score(frame)
    assert export.main([str(trained), str(tmp_path / "package")]) == 0
    package = loaded(tmp_path / "package")
    with pytest.raises(ValueError, match=r"column towns: found 'a\|b'; write a JSON list"):
        package.score(frame)
    found = package.score(frame, on_bad_value="missing")
    np.testing.assert_array_equal(found, package.score(frame.assign(towns="")))


def test_the_plan_of_prepared_data_has_each_table_once(trained):
    config = load_config(trained / "config.yaml")
    done = dry_run(config, Cluster(2, 2, "cpu", 10**10))
    assert list(done.work.tables) == [f"t_{table}" for table in TABLES]
    item = done.work.tables["t_item"]
    frame = pd.read_csv(trained.parent / "log.csv", dtype=str, keep_default_na=False)[:432]
    history = frame["history"].str.split("|").str.len().clip(upper=4).mean()
    assert item.ids == pytest.approx([1.0, 1.0, history])
    assert item.has_bags and not done.work.tables["t_user"].has_bags


def test_a_plan_from_sizes(tmp_path):
    given = ["data.tables={item: 100000, user: 1000}", "data.ids_per_sample={history: 50}"]
    apart = ["data.tables={item: 100000, user: 1000, history: 100000}", given[1]]
    shared = dry_run(planned_config(*given, "data.share={history: item}"), gpus(1, 80))
    separate = dry_run(planned_config(*apart), gpus(1, 80))
    item = shared.work.tables["t_item"]
    assert (item.rows, item.columns, sum(item.ids)) == (100_000, 12, 51.0)
    weights = [done.work.table_bytes() for done in (shared, separate)]
    assert weights[0] * 201 == weights[1] * 101
    assert shared.work.sample_bytes == separate.work.sample_bytes
    for wrong, words in (
        ("{history: itm}", "data.share: 'itm' is not a field of data.tables; write one of item"),
        ("{user: item}", "data.share: 'user' has a table in data.tables"),
    ):
        with pytest.raises(SettingsError, match=words):
            dry_run(planned_config(given[0], f"data.share={wrong}"), gpus(1, 80))


def test_a_plan_of_histories_from_sizes():
    """It has the bytes of the rows of 50 ids, and of the unit that weighs them."""
    given = [
        "data.tables={item: 100000, user: 1000}",
        "data.share={history: item}",
        "data.ids_per_sample={history: 50}",
        "model.name=din",
    ]
    summed = dry_run(planned_config(*given), gpus(1, 80)).work
    attends = dry_run(planned_config(*given, "data.attention={history: item}"), gpus(1, 80)).work
    assert (summed.tables["t_item"].outputs, attends.tables["t_item"].outputs) == (2.0, 51.0)
    per_sample = attends.sample_bytes - summed.sample_bytes - 3 * 49 * 12 * 4
    # Inputs of the unit, its 64 hidden numbers, and as many gradients.
    assert 50 * 4 * (4 * 10 + 64) < per_sample < 50 * 4 * 10 * (4 * 10 + 64)
    unit = (4 * 10 + 1) * 64 + 64 + 64 + 1
    assert attends.dense_parameters - summed.dense_parameters == unit
    one_by_one = [*given[:3], "model.name=bst", "data.sequences={history: item}"]
    dry_run(planned_config(*one_by_one), gpus(1, 80))
    for wrong, words in (
        ("attention={hist: item}", "data.attention: 'hist' is not a field of data.tables"),
        ("attention={history: itm}", "'itm' is not a field of data.tables that is no history"),
        ("sequences={history: history}", "'history' is not a field of data.tables that is no"),
    ):
        with pytest.raises(SettingsError, match=words):
            dry_run(planned_config(*given, f"data.{wrong}"), gpus(1, 80))


@pytest.mark.slow
def test_tables_that_were_shared_or_are_now_start_from_their_rows(trained, tmp_path):
    apart = SHOP.replace("share: item", "min_count: 1")
    folder = write_shop(tmp_path / "apart", apart)
    path, _, report = begun(folder, [f"checkpoint.init_from={trained}", "run.seed=5"])
    found, saved = tensors_of(path), tensors_of(newest(trained / "checkpoints"))
    then = pl.read_parquet(trained / "inputs/learned/item.parquet")["value"].to_list()
    cache = next(folder.glob("cache/*/learned"))
    for field in ("item", "history", "last"):
        now = pl.read_parquet(cache / f"{field}.parquet")["value"].to_list()
        common = set(then) & set(now)
        assert len(common) > 5
        for text in common:
            row, was = now.index(text) + 2, then.index(text) + 2
            assert torch.equal(found[weights_name(field)][row], saved[weights_name("item")][was])
    assert {one["field"] for one in report["fields"]} == {"user", "item", "history", "last", "town"}
    # And back: the fields use the rows of `item`; those of the others are not taken.
    other = train_on_shop(folder)
    back = write_shop(tmp_path / "back")
    path, _, report = begun(back, [f"checkpoint.init_from={other}", "run.seed=5"])
    fields = {one["field"]: one for one in report["fields"]}
    assert fields["history"]["why"] == fields["last"]["why"] == "not in this run"
    assert fields["item"]["loaded"] > 5
    found, saved = tensors_of(path), tensors_of(newest(other / "checkpoints"))
    rows = pl.read_parquet(next(back.glob("cache/*/learned")) / "item.parquet")["value"].to_list()
    was = pl.read_parquet(cache / "item.parquet")["value"].to_list()
    row = (rows.index("i1") + 2, was.index("i1") + 2)
    name = weights_name("item")
    assert torch.equal(found[name][row[0]], saved[name][row[1]])


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    """Three periods; the items of each are half new."""
    folder = tmp_path_factory.mktemp("days")
    frames = [shop(300, first, seed=number) for number, first in enumerate((0, 20, 40), 1)]
    train(write_frames(folder, SHOP, frames), ["checkpoint.keep=9"])
    return folder


@pytest.mark.slow
def test_shared_vocabularies_grow(days, tmp_path):
    files = [period(days, number) / "inputs/learned/item.parquet" for number in (1, 2, 3)]
    ids = [pl.read_parquet(file)["value"].to_list() for file in files]
    for then, now in pairwise(ids):
        assert now[: len(then)] == then and len(now) > len(then)
    logs = [pd.read_csv(days / f"log{n}.csv", dtype=str, keep_default_na=False) for n in (1, 2, 3)]
    counts = pd.Series(dtype=float)
    for number, log in enumerate(logs):
        cells = log["history"].str.split("|").str[-4:].explode()
        column = pd.concat([log["item"], log["last"], cells])
        counts = counts.add(column[column != ""].value_counts(), fill_value=0)
        assert set(ids[number]) == set(counts.index[counts >= 3])
    # Scored before it is trained on, by the model of the previous period.
    before = open_run(period(days, 2))
    scores = torch.from_numpy(before.score(days / "log3.csv"))
    labels = torch.tensor(logs[2]["clicked"].astype(float).to_numpy())
    logloss = float(torch.nn.functional.binary_cross_entropy(scores, labels))
    line = [line for line in lines(days / "runs/ads") if line["kind"] == "period"][2]
    assert line["logloss"] == pytest.approx(logloss, rel=1e-5)


@pytest.mark.slow
def test_deltas_hold_shared_tables_once(days, tmp_path):
    full = {}
    for number in (1, 2):
        full[number] = tmp_path / f"full{number}"
        assert export.main([str(period(days, number)), str(full[number])]) == 0
    arguments = [period(days, 2), tmp_path / "delta", "--since", full[1]]
    status, said = run_command(export.main, *arguments)
    assert status == 0, said
    tables = {path.stem for path in (tmp_path / "delta/changes").glob("*.safetensors")}
    assert tables == set(TABLES)
    made = update.apply(full[1], [tmp_path / "delta"], tmp_path / "made")
    frame = pl.from_pandas(shop(30, 20, seed=9).drop(columns="clicked").astype(str))
    expected = open_run(period(days, 2)).score(frame)
    np.testing.assert_allclose(loaded(made).score(frame), expected, atol=1e-6)


def test_continuing_needs_the_same_sharing(trained, tmp_path):
    folder = write_shop(tmp_path / "again")
    options = ["train.epochs=1", "run.name=one"]
    train_on_shop(folder, *options)
    (folder / "schema.yaml").write_text(SHOP.replace("last: {share: item}", "last: {min_count: 3}"))
    with pytest.raises(Exception, match=r"(?s)shared"):
        train_on_shop(folder, "train.epochs=2", "run.name=one", "checkpoint.resume=auto")
