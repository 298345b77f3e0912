"""Several goals, from a log to scores."""

import copy
import json

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from sklearn.metrics import log_loss, roc_auc_score

from stampede import open_run
from stampede.data import DataError
from stampede.engine import step as step_module
from stampede.engine.config import check_log, goal_weights
from stampede.engine.errors import RunFolderError
from stampede.engine.job.build import build
from stampede.engine.processes import processes
from stampede.engine.reading import Reader, open_dataset
from stampede.engine.run import run
from stampede.engine.step import prefetch, train_step
from stampede.engine.training.evaluate import evaluate
from stampede.settings import SettingsError
from support.goals import SCHEMA, goal_config, goal_log, write_goals
from support.jobs import lines
from support.packages import loaded
from support.predicting import predict, scores

WEIGHTS = {"click": 0.5, "buy": 3.0}
WEIGHTED = ["train.goals.click=0.5", "train.goals.buy=3"]


def reference_of_a_step(model, batch, rows, weighting):
    """Loss, gradient of the rows, and gradients of the dense layers: the formulas in float64."""
    model = copy.deepcopy(model, {id(model.front): model.front}).double()
    rows = rows.double().requires_grad_()
    logits = model.logits(rows, batch.dense.double())
    loss = objective = 0.0
    for goal, weight in enumerate(WEIGHTS.values()):
        label, of_goal = batch.label[:, goal].double(), logits[:, goal]
        known = ~label.isnan()
        p = torch.sigmoid(of_goal[known])
        y, w = label[known], batch.weight[known].double()
        mean = -(w * (y * p.log() + (1 - y) * (1 - p).log())).sum() / w.sum()
        loss = loss + weight * mean
        objective = objective + weight * mean
        if weighting == "uncertainty":
            s = model.goal_losses.log_variances[goal]
            objective = objective + weight * mean * ((-s).exp() - 1) + s / 2
    objective.backward()
    dense = {n: p.grad for n, p in model.named_parameters() if not n.startswith("front.")}
    return loss.item(), rows.grad, dense


@pytest.mark.slow
@pytest.mark.parametrize("weighting", ["fixed", "uncertainty"])
@pytest.mark.parametrize("tile_rows", [8192, 24])
def test_a_step_against_float64(tmp_path, monkeypatch, weighting, tile_rows):
    monkeypatch.setattr(step_module, "TILE_ROWS", tile_rows)
    seen, compute = [], step_module._dense_pass

    def noted(job, batch, looked_up, *rest):
        loss, grads = compute(job, batch, looked_up, *rest)
        seen.append((batch, looked_up.rows.detach().clone(), grads[0].clone()))
        return loss, grads

    monkeypatch.setattr(step_module, "_dense_pass", noted)
    more = [f"train.goal_weighting={weighting}", "model.options.experts=3"]
    config = goal_config(write_goals(tmp_path), *WEIGHTED, *more)
    with processes("cpu") as here:
        dataset = open_dataset(config, here)
        job = build(config, dataset, here)
        if weighting == "uncertainty":
            job.ctr_model.goal_losses.log_variances.data.copy_(torch.tensor([0.3, -0.7]))
        batches = Reader(config, dataset, here).training()
        for step, sent in enumerate(prefetch(batches, job.front, here.device), 1):
            before = copy.deepcopy(job.ctr_model, {id(job.front): job.front})
            loss = train_step(job, sent, step, here)
            batch, rows, grad = seen.pop()
            assert batch.label.isnan().any() and not batch.label.isnan().all(0).any()
            expected = reference_of_a_step(before, batch, rows, weighting)
            assert loss.item() == pytest.approx(expected[0], rel=1e-5)
            torch.testing.assert_close(grad.double(), expected[1], rtol=1e-4, atol=1e-7)
            found = {n: p.grad.double() for n, p in job.dense_parameters.items()}
            assert found.keys() == expected[2].keys()
            for name, of_layer in expected[2].items():
                torch.testing.assert_close(found[name], of_layer, rtol=1e-3, atol=1e-6, msg=name)
        assert step == len(batches) > 5


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run on the log."""
    folder = write_goals(tmp_path_factory.mktemp("goals"))
    more = ["evaluate.group_by=user", "train.epochs=3", "evaluate.select_goals=buy"]
    run(goal_config(folder, *WEIGHTED, *more))
    return folder / "goals"


def by_user(frame, scores, label, weight):
    """GAUC by scikit-learn."""
    aucs, sums = [], []
    for _, of_user in frame.assign(s=scores, y=label, w=weight).groupby("user"):
        if of_user["y"].nunique() == 2:
            aucs.append(roc_auc_score(of_user["y"], of_user["s"], sample_weight=of_user["w"]))
            sums.append(of_user["w"].sum())
    return np.average(aucs, weights=sums)


@pytest.mark.slow
def test_metrics_of_each_goal(tmp_path):
    """Of the initial model on the training part, against scikit-learn."""
    config = goal_config(write_goals(tmp_path), "evaluate.group_by=user")
    with processes("cpu") as here:
        dataset = open_dataset(config, here)
        model, reader = build(config, dataset, here).model, Reader(config, dataset, here)
        batches = reader.evaluation(dataset.train)
        found = evaluate(model, batches, here, config.evaluate, goals=WEIGHTS)
        read = dataset.train.read(torch.arange(dataset.train.rows))
        with torch.no_grad():
            logits = [model(b.sparse, b.dense)[: b.samples] for b in batches.epoch(0)]
        scores = torch.cat(logits).double().sigmoid().numpy()
    weight, users = read.weight.numpy(), pd.DataFrame({"user": read.ids[:, 0].numpy()})
    for goal, name in enumerate(WEIGHTS):
        label = read.label[:, goal].numpy()
        known = ~np.isnan(label)
        y, p, w = label[known], scores[known, goal], weight[known]
        of_goal = found["goals"][name]
        assert of_goal["samples"] == known.sum()
        assert of_goal["auc"] == pytest.approx(roc_auc_score(y, p, sample_weight=w), abs=1e-6)
        assert of_goal["logloss"] == pytest.approx(log_loss(y, p, sample_weight=w), rel=1e-5)
        assert of_goal["calibration"] == pytest.approx((w @ p) / (w @ y), rel=1e-5)
        assert of_goal["gauc"] == pytest.approx(by_user(users[known], p, y, w), abs=1e-6)
    for name in ("auc", "logloss", "gauc"):
        mean = (0.5 * found["goals"]["click"][name] + 3 * found["goals"]["buy"][name]) / 3.5
        assert found[name] == pytest.approx(mean)


@pytest.mark.slow
def test_what_a_run_records(trained):
    summary = json.loads((trained / "summary.json").read_text())
    for line in (line for line in lines(trained) if line["kind"] == "evaluation"):
        # The goal that selects.
        assert line["auc"] == line["goals"]["buy"]["auc"] != line["goals"]["click"]["auc"]
    best = max(
        (line for line in lines(trained) if line.get("part") == "validation"),
        key=lambda line: line["auc"],
    )
    assert summary["validation"]["goals"]["buy"]["auc"] == best["goals"]["buy"]["auc"]
    opened = open_run(trained)
    history = opened.history
    assert history["validation_buy_auc"].max() == best["auc"]
    assert {"test_click_logloss", "test_buy_gauc"} <= set(history.columns)
    assert opened.metrics["test"]["goals"].keys() == WEIGHTS.keys()
    assert summary["logistic_regression"] is None


def test_the_weights_that_select(tmp_path):
    write_goals(tmp_path)
    for overrides, weights in (
        ([], {"click": 1.0, "buy": 1.0}),
        (["train.goals.buy=2"], {"click": 1.0, "buy": 2.0}),
        (["train.goals.buy=2", "evaluate.select_goals.click=0.3"], {"click": 0.3, "buy": 0.0}),
        (["evaluate.select_goals=click"], {"click": 1.0, "buy": 0.0}),
    ):
        assert goal_weights(goal_config(tmp_path, *overrides), ["click", "buy"]) == weights


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["train.goals.by=2"], "train.goals: found 'by', but the goals are click, buy"),
        (["evaluate.select_goals=sale"], "evaluate.select_goals: found 'sale', but the goals are"),
        (["evaluate.select_goals.buy=0"], "evaluate.select_goals: all weights are 0"),
        (["train.goals.buy=0", "train.goals.click=0"], "train.goals: all weights are 0"),
        (["model.name=deepfm", "model.options={}"], "model.name: found 'deepfm', which has one"),
        (["evaluate.compare_with_lr=true"], "evaluate.compare_with_lr: found true, but that"),
        (["evaluate.compare_with_trees=true"], "evaluate.compare_with_trees: found true"),
    ],
)
def test_settings_that_do_not_fit_the_goals(tmp_path, overrides, words):
    """They are refused before the log is prepared."""
    config = goal_config(write_goals(tmp_path), *overrides)
    with pytest.raises(SettingsError, match=words):
        check_log(config)
    with processes("cpu") as here, pytest.raises(SettingsError, match=words):
        open_dataset(config, here)
    assert not (tmp_path / "cache").exists()


def test_a_single_label_has_no_goals(tmp_path):
    schema = SCHEMA.replace("{click: clicked, buy: {column: price_paid, at_least: 10}}", "clicked")
    write_goals(tmp_path, schema=schema)
    plain = ["model.name=deepfm", "model.options={}"]
    for overrides, words in (
        ([], "'mmoe', which is for several goals, but the data have one label"),
        ([*plain, "train.goals.click=2"], "train.goals: found 'click', but the data have one"),
        ([*plain, "train.goal_weighting=uncertainty"], "train.goal_weighting: found 'uncertainty'"),
    ):
        with pytest.raises(SettingsError, match=words):
            check_log(goal_config(tmp_path, *overrides))


@pytest.mark.slow
def test_scores_of_files_frames_and_packages(trained, tmp_path):
    frame = goal_log()
    frame.to_csv(tmp_path / "log.csv", index=False)
    table = scores(trained, [tmp_path / "log.csv"], tmp_path)
    assert table.columns == [
        "file", "row", "score_click", "score_buy", "label_click", "label_buy", "weight",
    ]  # fmt: skip
    found = table["score_click", "score_buy"].to_numpy()
    assert found.std(0).min() > 1e-5 and (found[:, 0] != found[:, 1]).all()
    assert table["label_buy"].is_null().to_list() == frame["price_paid"].isna().tolist()
    assert table["label_click"].to_list() == frame["clicked"].tolist()
    opened, inputs = open_run(trained), frame.drop(columns=["clicked", "price_paid"])
    assert opened.goals == ["click", "buy"]
    np.testing.assert_array_equal(opened.score(inputs), found)
    assert opened.score(inputs[:0]).shape == (0, 2)
    package = loaded(opened.export(tmp_path / "package"))
    assert package.goals == ["click", "buy"]
    np.testing.assert_allclose(package.score(inputs), found, rtol=1e-6)
    assert package.score(inputs[:0]).shape == (0, 2)
    status, said = predict(trained, tmp_path / "log.csv", tmp_path / "again.parquet")
    known = frame["price_paid"].notna()
    auc = roc_auc_score(
        frame["price_paid"][known] >= 10, found[known, 1], sample_weight=frame["importance"][known]
    )
    assert status == 0 and f"AUC of buy {auc:.4f}" in " ".join(said.split())
    # Without labels, and from the run's own prepared data.
    inputs.to_csv(tmp_path / "inputs.csv", index=False)
    names = scores(trained, [tmp_path / "inputs.csv"], tmp_path).columns
    assert names == ["file", "row", "score_click", "score_buy", "weight"]
    assert scores(trained, ["@run"], tmp_path)["label_buy"].null_count() > 10


def test_other_goals_are_other_data(trained, tmp_path):
    schema = SCHEMA.replace("{click: clicked, buy:", "{click: clicked, sale:")
    write_goals(tmp_path, schema=schema)
    config = goal_config(tmp_path)
    with processes("cpu") as here:
        open_dataset(config, here)
    (folder,) = (tmp_path / "cache").iterdir()
    status, said = predict(trained, folder, tmp_path / "scores.parquet")
    assert status == 2 and "the goals click, sale, where " in said


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("more", [["train.goal_weighting=uncertainty"], ["model.name=esmm"]])
def test_a_continued_run_is_the_whole_one(tmp_path, more):
    if "model.name=esmm" in more:
        more = [*more, "model.options={}"]
    write_goals(tmp_path)
    run(goal_config(tmp_path, *more, "train.epochs=2", "run.name=whole"))
    run(goal_config(tmp_path, *more, "run.name=parts"))
    run(goal_config(tmp_path, *more, "run.name=parts", "train.epochs=2", "checkpoint.resume=auto"))
    whole, parts = (open_run(tmp_path / name) for name in ("whole", "parts"))
    assert whole.summary["last"] == parts.summary["last"]
    np.testing.assert_array_equal(whole.score(goal_log()), parts.score(goal_log()))
    if "esmm" in str(more):
        found = whole.score(goal_log())
        assert (found[:, 1] < found[:, 0]).all()
        return
    variances = whole._model.goal_losses.log_variances
    assert variances.abs().min() > 0
    # Its weights start another run.
    run(goal_config(tmp_path, *more, "run.name=next", f"checkpoint.init_from={whole.path}"))
    report = json.loads((tmp_path / "next/init_from.json").read_text())
    assert not [name for name in report["new"] if "model." in name]
    with pytest.raises(RunFolderError, match="trained for the goals click, buy, found buy, click"):
        swapped(tmp_path, *more, f"checkpoint.init_from={whole.path}")


def swapped(folder, *more):
    """Train on the goals in the other order."""
    schema = yaml.safe_load(SCHEMA)
    schema["label"] = dict(reversed(schema["label"].items()))
    other = write_goals(folder / "swapped", schema=yaml.safe_dump(schema, sort_keys=False))
    run(goal_config(other, *more))


def test_esmm_says_which_goal_comes_first(tmp_path, capsys):
    swapped(tmp_path, "model.name=esmm", "model.options={}", "model.initial_bias=log_odds")
    assert "write the click first in the schema's label" in capsys.readouterr().out


@pytest.mark.parametrize(
    "paid, words",
    [
        (1.0, r"every label of the goal 'buy' in the training part is 0 \(720 rows\), so there is"),
        (50.0, "every label of the goal 'buy' in the training part is 1"),
        (np.nan, r"no label of the goal 'buy' in the training part \(720 rows\)"),
    ],
)
def test_a_goal_that_cannot_be_learned(tmp_path, paid, words):
    write_goals(tmp_path, goal_log().assign(price_paid=paid))
    with pytest.raises(DataError, match=words):
        run(goal_config(tmp_path))


@pytest.mark.slow
def test_a_part_without_labels_of_the_goal_that_selects(tmp_path):
    frame = goal_log()
    frame.loc[800:, "price_paid"] = np.nan
    write_goals(tmp_path, frame)
    by_order = "data.split=sequential"
    with pytest.raises(DataError, match=r"no sample of the test part has .* a label of buy, so"):
        run(goal_config(tmp_path, by_order, "evaluate.select_goals=buy"))
    # With another goal it is trained, and that goal's metrics are not known.
    run(goal_config(tmp_path, by_order, "run.overwrite=true"))
    summary = json.loads((tmp_path / "goals/summary.json").read_text())
    assert summary["goals"]["buy"]["auc"] is None and summary["goals"]["buy"]["logloss"] is None
    assert summary["auc"] == summary["goals"]["click"]["auc"]
