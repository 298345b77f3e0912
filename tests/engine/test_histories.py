"""Runs with histories that a query attends to: wherever they are read, stored and scored."""

import json
import re

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import torch

from stampede import open_run
from stampede.engine.checkpoint.manifest import read_manifest
from stampede.engine.checkpoint.retention import newest
from stampede.engine.config.load import load_config
from stampede.engine.inference import export_command as export
from stampede.engine.planning.dry_run import dry_run
from stampede.engine.planning.planner import Cluster
from stampede.engine.run import run
from stampede.settings import SettingsError
from support.jobs import lines, tensors_of
from support.packages import loaded, logits_alone, onnx_inputs
from support.paths import ROOT
from support.ranks import run_ranks
from support.shop import SHOP, shop, train_on_shop, write_shop
from support.warm_starts import begun

ATTENDS = SHOP.replace("pooling: mean", "pooling: attention, query: item").replace(
    "{separator: json, share: town}", "{separator: json, pooling: attention, query: town}"
)
# Read one by one by the network.
ONE_BY_ONE = ATTENDS.replace("pooling: attention", "pooling: none")
OPTIONS = ["model.hidden=[16]", "model.attention.hidden=[6]", "train.epochs=2"]
# And batch norm: scores take what training has noted of its batches.
DICE = ["model.name=din", "model.options.activation=dice", "model.attention.activation=dice",
        "model.normalization=batch"]  # fmt: skip
# Of tables that are pooled, and of those that are not.
WIDTHS = ["model.dims={user: 3, item: 20, towns: 5}"]
BST = ["model.name=bst", "model.hidden=[16]", "model.options.positions=4", "train.epochs=2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_on_shop(write_shop(tmp_path_factory.mktemp("shop"), ATTENDS), *OPTIONS, *DICE)


@pytest.fixture(scope="module")
def trained_bst(tmp_path_factory):
    return train_on_shop(write_shop(tmp_path_factory.mktemp("shop"), ONE_BY_ONE), *BST)


@pytest.fixture(scope="module")
def trained_widths(tmp_path_factory):
    folder = write_shop(tmp_path_factory.mktemp("shop"), ATTENDS)
    return train_on_shop(folder, "model.name=deepfm", *OPTIONS, *WIDTHS)


@pytest.fixture(params=["trained", "trained_bst", "trained_widths"])
def either(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def rows_to_score():
    frame = shop(40, seed=8).drop(columns="clicked").astype(str)
    frame.loc[0, ["item", "history", "last", "towns"]] = ["new", "i1|new|i0|i2|i3|i4", "new", ""]
    frame.loc[1, ["history", "towns"]] = ["", "[]"]
    return frame


@pytest.mark.slow
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
    found = np.concatenate(
        [np.diff(np.load(one)) for one in sorted(shard.glob("train*offsets_0*"))]
    )
    assert found.tolist() == expected and 0 in expected


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.usefixtures("one_registry")
def test_packages_and_onnx_files_score_as_the_run(either, rows_to_score, tmp_path):
    expected = open_run(either).score(rows_to_score)
    assert expected.std() > 0.02
    file, folder = tmp_path / "model.onnx", tmp_path / "package"
    assert export.main([str(either), str(folder)]) == 0
    columns = {name: rows_to_score[name].tolist() for name in rows_to_score}
    (found,) = logits_alone(folder, [columns], tmp_path)
    np.testing.assert_allclose(1 / (1 + np.exp(-np.array(found))), expected, atol=1e-6)
    package = loaded(folder)
    one_by_one = [package.score({n: [v[i]] for n, v in columns.items()})[0] for i in range(40)]
    np.testing.assert_allclose(one_by_one, expected, atol=1e-6)
    assert export.main([str(either), str(file), "--format", "onnx"]) == 0
    session = onnxruntime.InferenceSession(file)
    (found,) = session.run(["probability"], onnx_inputs(session, columns, package))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    # A table of several fields is there once; weights are stored as they are in memory.
    of_item = package._tables[package.fields.index("item")]
    table = torch.cat([of_item["embedding"], of_item["first_order"].unsqueeze(1)], 1)
    assert file.read_bytes().count(table.numpy().tobytes()) == 1


LONG = SHOP.replace("max_ids: 4", "max_ids: 90")
LONG_ATTENDS = LONG.replace("pooling: mean", "pooling: attention, query: item")
WEIGHTED = "{separator: json, share: town, weights: shares}"
GOALS = LONG_ATTENDS.replace("label: clicked", "label: {click: clicked, buy: bought}").replace(
    "{separator: json, share: town}", WEIGHTED
)
# One history is read by the network, the other one is attended to.
BOTH = LONG_ATTENDS.replace("pooling: attention", "pooling: none").replace(
    "{separator: json, share: town}",
    "{separator: json, share: town, pooling: attention, query: town}\n"
    "  places: {column: towns, separator: json, share: town, weights: shares}",
)
NETWORKS = {
    "dice": (LONG_ATTENDS, DICE),
    "softmax": (
        LONG_ATTENDS,
        ["model.name=deepfm", "model.attention.softmax=true", "model.dims={user: 3, item: 20}"],
    ),
    "goals": (GOALS, ["model.name=mmoe", "model.options.tower=[5]"]),
    "pooled": (LONG, ["model.name=deepfm"]),
    "bst": (BOTH, [*BST, "model.options.pooling=sum", "model.attention.softmax=true"]),
    "two layers": (LONG_ATTENDS.replace("attention,", "none,"), [*BST, "model.options.layers=2"]),
}


def long_shop(rows, seed):
    """The shop with histories of up to 100 ids, and weights of towns."""
    draw, frame = np.random.default_rng(seed), shop(rows, seed=seed)
    lengths = np.minimum(draw.geometric(1 / 16, rows) - 1, 100)
    lengths[:8] = 0, 1, 15, 16, 17, 65, 89, 100
    items = [[f"i{item}" for item in draw.zipf(1.4, length) % 60] for length in lengths]
    frame["history"] = ["|".join(cell) for cell in items]
    counts = [len(json.loads(cell)) for cell in frame["towns"]]
    frame["shares"] = [json.dumps(draw.random(count).round(3).tolist()) for count in counts]
    return frame.assign(bought=frame["clicked"] * draw.integers(0, 2, rows))


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.parametrize("case", NETWORKS)
def test_the_bits_of_a_score_depend_on_its_sample_alone(case, tmp_path):
    """Not on the samples beside it, nor on whether the run or its package scores."""
    schema, options = NETWORKS[case]
    folder = write_shop(tmp_path / "shop", schema, long_shop(500, 5))
    opened = open_run(train_on_shop(folder, *OPTIONS, *options, "train.epochs=1"))
    opened.export(tmp_path / "package")
    package, draw = loaded(tmp_path / "package"), np.random.default_rng(1)
    rows = long_shop(400, 8).drop(columns=["clicked", "bought"]).astype(str)
    expected = opened.score(rows)
    assert expected.std() > 0.005 and np.isfinite(expected).all()
    for size in (1, 7, 48, 333, 9999):
        np.testing.assert_array_equal(opened.score(rows, batch_size=size), expected)
        found = package.score({name: rows[name].tolist() for name in rows}, batch_size=size)
        np.testing.assert_array_equal(found, expected)
    # Some of them in another order, and those whose history is short, or empty.
    ids = rows["history"].str.count("i").to_numpy()
    for some in (draw.permutation(400)[:90], np.flatnonzero(ids < 9), np.flatnonzero(ids == 0)):
        columns = {name: rows[name].iloc[some].tolist() for name in rows}
        np.testing.assert_array_equal(package.score(columns), expected[some])
        np.testing.assert_array_equal(opened.score(rows.iloc[some]), expected[some])


def test_a_plan_counts_a_row_for_each_id(trained):
    done = dry_run(load_config(trained / "config.yaml"), Cluster(2, 2, "cpu", 10**10))
    frame = pd.read_csv(trained.parent / "log.csv", dtype=str, keep_default_na=False)[:432]
    ids = [min(len(cell.split("|")), 4) if cell else 0 for cell in frame["history"]]
    item = done.work.tables["t_item"]
    assert item.ids == pytest.approx([1.0, 1.0, np.mean(ids)])
    # A row of each id as it arrives, as the model reads it, and its gradient.
    assert done.work.sample_bytes > 3 * np.mean(ids) * item.columns * 4


@pytest.mark.parametrize("plan", ["table_row_wise", "table_column_wise", "grid_shard"])
def test_a_plan_that_torchrec_has_for_pooled_tables_only_is_refused(trained, plan):
    config = load_config(trained / "config.yaml", [f"sharding.plan={plan}"])
    words = f"sharding.plan: found '{plan}', .* here t_item, t_towns; write auto, data_parallel, "
    with pytest.raises(SettingsError, match=words):
        dry_run(config, Cluster(2, 2, "cpu", 10**10))


@pytest.mark.slow
def test_fields_that_are_attended_to_start_from_pooled_ones_and_back(tmp_path):
    plain = write_shop(tmp_path / "plain")
    pooled, folder = train_on_shop(plain), write_shop(tmp_path / "attends", ATTENDS)
    path, _, report = begun(folder, [f"checkpoint.init_from={pooled}", *OPTIONS])
    fields = {one["field"]: one for one in report["fields"]}
    assert fields["item"]["loaded"] > 5 and fields["item"]["new"] == 0
    found, saved = tensors_of(path), tensors_of(newest(pooled / "checkpoints"))
    item = saved["model.front.ebc.embedding_bags.t_item.weight"]
    assert torch.equal(found["model.front.ec.embeddings.t_item.weight"], item)
    assert any(name.startswith("model.attention.of_history") for name in report["new"])
    attending = train_on_shop(folder, *OPTIONS)
    back = write_shop(tmp_path / "back")
    path, _, _ = begun(back, [f"checkpoint.init_from={attending}"])
    found, saved = tensors_of(path), tensors_of(newest(attending / "checkpoints"))
    item = saved["model.front.ec.embeddings.t_item.weight"]
    assert torch.equal(found["model.front.ebc.embedding_bags.t_item.weight"], item)


def continued(folder, options, ranks):
    train_on_shop(folder, *options, world_size=ranks)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("more", [[], WIDTHS], ids=["one width", "widths"])
def test_a_run_continues_with_another_plan_and_more_ranks(tmp_path, more):
    """As one that was not interrupted, up to rounding: tables move, with their moments."""
    options = [*OPTIONS, "run.name=one", *more]
    whole = train_on_shop(write_shop(tmp_path / "whole", ATTENDS), *options)
    folder = write_shop(tmp_path / "parts", ATTENDS)
    first = [*options, "train.epochs=1", "sharding.plan=row_wise"]
    train_on_shop(folder, *first)
    more = [*options, "checkpoint.resume=auto", "sharding.plan=column_wise"]
    run_ranks(2, continued, folder, more, 2)
    found, expected = (tensors_of(newest(run / "checkpoints")) for run in (folder / "one", whole))
    assert found.keys() - {"random.rank_1"} == expected.keys()
    for name, tensor in expected.items():
        if name.startswith("model.") and tensor.is_floating_point():
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)


def test_tables_have_the_widths_of_their_fields(trained_widths):
    run = open_run(trained_widths)
    widths = {"user": 3, "item": 20, "history": 20, "last": 20, "town": 10, "towns": 5}
    assert {name: run.embeddings(name).shape[1] for name in widths} == widths
    sizes, owners = run.fields, ("user", "item", "town", "towns")
    summary = json.loads((trained_widths / "summary.json").read_text())
    assert summary["parameters"]["tables"] == sum(sizes[n] * (widths[n] + 1) for n in owners)
    saved = tensors_of(newest(trained_widths / "checkpoints"))
    assert saved["model.projections.of_item"].shape == (10, 20)
    assert saved["model.front.ec_of.24.embeddings.t_item.weight"].shape == (sizes["item"], 24)


@pytest.mark.slow
def test_rows_of_another_width_are_not_taken(trained_widths, tmp_path):
    folder, more = write_shop(tmp_path / "next", ATTENDS), "model.dims={user: 3, item: 8}"
    init = f"checkpoint.init_from={trained_widths}"
    path, _, report = begun(folder, [init, "model.name=deepfm", *OPTIONS, more])
    fields = {one["field"]: one for one in report["fields"]}
    assert fields["user"]["loaded"] == fields["user"]["rows"] > 30
    assert fields["item"]["loaded"] == 0 and fields["item"]["why"] == "dim was 20, now 8"
    assert report["new"]["model.projections.of_item"] == "was [10, 20], now [10, 8]"
    saved = tensors_of(newest(trained_widths / "checkpoints"))
    for name in ("model.projections.of_user", "model.front.ebc.embedding_bags.t_user.weight"):
        assert torch.equal(tensors_of(path)[name], saved[name])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "model.dims={shop: 3}",
            "model.dims: 'shop' is no id field; write one of user, item, town, towns",
        ),
        (
            "model.dims={history: 3}",
            "model.dims: 'history' uses the table of item; write one of user, item, town, towns",
        ),
        ("model.dims={user: 0}", "model.dims.user: found 0"),
    ],
)
def test_wrong_widths_are_refused(tmp_path, given, message):
    with pytest.raises(SettingsError, match=re.escape(message)):
        train_on_shop(write_shop(tmp_path / "shop", ATTENDS), *OPTIONS, given)


@pytest.mark.soak
def test_attention_is_worth_most_of_the_gap_to_the_truth(tmp_path):
    """On synthetic users, against the same network on sums."""
    gained = {}
    for how in ("attention", "sum"):
        config = load_config(
            ROOT / "configs/histories.yaml",
            [
                f"run.dir={tmp_path}", f"run.name={how}", f"data.histories={how}",
                "data.rows=150000", "data.test_rows=20000", "train.epochs=2",
                "evaluate.compare_with_lr=false",
            ],
        )  # fmt: skip
        run(config)
        line = [one for one in lines(tmp_path / how) if one.get("part") == "test"][-1]
        gained[how] = (line["auc"] - 0.5) / (line["attainable_auc"] - 0.5)
        assert line["gauc"] > 0.7
    assert gained["attention"] > 0.8 and gained["attention"] > gained["sum"] + 0.1
