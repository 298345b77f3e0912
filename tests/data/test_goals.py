"""Several goals: their labels in the schema, in prepared folders, and in batches."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from stampede.data import GlobalBatches, click_shares, only_labels, open_prepared
from stampede.data.describe import main as describe
from stampede.data.raw.log import labels_of, scoring_log
from stampede.data.raw.rows import BadRows
from stampede.data.schema.schema import Schema, load_schema
from stampede.settings import SettingsError
from support.goals import SCHEMA, goal_log
from support.prepared_arrays import arrays_of, manifest_of
from support.preparing import table

RANDOM = {"split": "random", "test_fraction": 0.3, "validation_fraction": 0.2}


def loaded(folder, label):
    path = folder / "schema.yaml"
    path.write_text(f"label: {label}\nids: [user, item]\n")
    return load_schema(path)


@pytest.mark.parametrize(
    "written, goals",
    [
        ("clicked", []),
        ("{column: clicked}", []),
        ("{column: paid, at_least: 1}", []),
        ("{column: event, positive: [click]}", []),
        ("{click: clicked, buy: {column: paid, at_least: 1}}", ["click", "buy"]),
        ("{buy: {column: event, positive: [buy]}, click: {column: event, positive: [click, buy]}}",
         ["buy", "click"]),
        ("{view_3s: {column: seen, at_least: 3}, view-30s: {column: seen, at_least: 30}}",
         ["view_3s", "view-30s"]),
    ],
)  # fmt: skip
def test_forms_of_labels(tmp_path, written, goals):
    schema = loaded(tmp_path, written)
    assert schema.goals == goals and schema.label.keys() == set(goals or [""])
    # As a prepared folder keeps it.
    again = Schema.model_validate(json.loads(schema.model_dump_json()))
    assert again == schema and list(again.label) == list(schema.label)


def test_a_single_label_is_written_as_before():
    """Names of prepared folders are hashes of this."""
    schema = Schema.model_validate({"label": "clicked", "ids": ["user"]})
    assert schema.model_dump(mode="json")["label"] == {
        "column": "clicked", "at_least": None, "positive": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    "written, words",
    [
        ("{buy: bought}", "found only the goal 'buy'; write `label: bought`, or several goals"),
        ("{colum: paid}", "found only the goal 'colum'; write `label: paid`"),
        ("{column: paid, buy: bought}", "a goal called 'column', which is a key of a single label"),
        ("{click: clicked, positive: {column: bought}}", "a goal called 'positive', which is a k"),
        ("{column: paid, at_leest: 1}", "label.at_leest: unknown key; did you mean 'label.at_least'"
         "|label.at_leest: unknown key; did you mean 'at_least'"),
        ("{click: clicked, 'to buy': bought}", "goal 'to buy': write letters, digits, '_' and '-'"),
        ("{click: clicked, buy: clicked}", "the goals 'click' and 'buy' are the same rule for the "
         "column 'clicked'; leave one out"),
        ("{click: clicked, buy: {column: paid, at_leest: 1}}", "label.buy.at_leest: unknown key; "
         "did you mean 'at_least'"),
        ("{click: clicked, buy: {column: paid, at_least: much}}", "label.buy.at_least: found 'much"
         "'; write a (valid )?number"),
        ("{click: clicked, buy: 3}", "label.buy: found 3; write a section with keys"),
        ("{column: 3}", "label.column: found 3; write text"),
    ],
)  # fmt: skip
def test_labels_that_cannot_be_meant(tmp_path, written, words):
    with pytest.raises(SettingsError, match=words):
        loaded(tmp_path, written)


def expected_labels(frame):
    """`[n, 2]`: clicks and purchases of at least 10, NaN where the price is not known."""
    paid = frame["price_paid"].to_numpy()
    bought = np.where(np.isnan(paid), np.nan, paid >= 10)
    return np.stack([frame["clicked"].to_numpy(float), bought], 1)


def test_prepared_labels(tmp_path):
    frame = goal_log().assign(row=np.arange(1000))
    schema = SCHEMA.replace("x: {transform", "row: {transform: [], bins: 0}, x: {transform")
    folder = table(tmp_path, frame, schema, **RANDOM)
    assert manifest_of(folder)["goals"] == ["click", "buy"]
    met = []
    for part in ("train", "validation", "test"):
        found, _ = arrays_of(folder, part)
        rows = found["numbers"][:, 0].astype(int)
        assert found["label"].dtype == np.float32 and found["label"].shape == (len(rows), 2)
        np.testing.assert_array_equal(found["label"], expected_labels(frame)[rows])
        met += rows.tolist()
    assert sorted(met) == frame["row"].tolist()
    dataset = open_prepared(folder)
    assert dataset.goals == ("click", "buy")
    assert only_labels(dataset.train) == [None, None]
    train, _ = arrays_of(folder, "train")
    label, weight = train["label"].astype(float), train["weight"].astype(float)
    known = ~np.isnan(label)
    shares = [np.average(label[k, g], weights=weight[k]) for g, k in enumerate(known.T)]
    assert [of.share for of in click_shares(dataset.train)] == pytest.approx(shares, rel=1e-12)


@pytest.mark.parametrize("weighted", [True, False])
def test_batches(tmp_path, weighted):
    """Padding has no weight; each goal counts the weights of the samples that have it."""
    schema = SCHEMA if weighted else SCHEMA.replace("weight: importance", "")
    dataset = open_prepared(table(tmp_path, goal_log(), schema, **RANDOM))
    part, fields = dataset.test, list(dataset.vocabulary_sizes)
    of_ranks = [list(GlobalBatches(part, fields, 64, rank, 2).epoch(0)) for rank in (0, 1)]
    start = 0
    for alone, *both in zip(GlobalBatches(part, fields, 64, 0, 1).epoch(0), *of_ranks, strict=True):
        rows = torch.arange(start, start + alone.global_samples)
        label, weight = part.label(rows).double(), part.weight(rows)
        weight = torch.ones(len(rows)) if weight is None else weight
        expected = [weight[~of_goal.isnan()].sum().item() for of_goal in label.T]
        for batch in (alone, *both):
            assert batch.global_weight.tolist() == pytest.approx(expected)
        found = torch.cat([batch.label for batch in both])
        padding = len(found) - len(rows)
        torch.testing.assert_close(found[: len(rows)].double(), label, equal_nan=True)
        assert torch.cat([batch.weight for batch in both])[len(rows) :].tolist() == [0.0] * padding
        start += alone.global_samples
    assert start == part.rows


def test_a_description_has_the_parts_of_each_goal(tmp_path, capsys):
    frame = goal_log()
    # In the first, the test part, nothing was bought.
    frame.loc[:399, "price_paid"] = np.where(frame["price_paid"][:400].isna(), np.nan, 0)
    frame["day"] = np.repeat(["a", "b"], [400, 600])
    frame.to_csv(tmp_path / "log.csv", index=False)
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    given = [str(tmp_path / "log.csv"), "--schema", str(tmp_path / "schema.yaml")]
    split = ["split=by_column", "split_column=day", "test_values=[a]", "validation_fraction=0"]
    for one in split:
        given += ["--set", one]
    assert describe([*given, "--out", str(tmp_path / "out")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for goal, label in zip(("click", "buy"), expected_labels(frame).T, strict=True):
        test, known = label[:400], ~np.isnan(label)
        rows, clicks = (~np.isnan(test)).sum(), np.nansum(test)
        table = said[said.index(f"part, of {goal} rows") :]
        assert f"test {rows} {rows / known.sum():.2%} {clicks:.0f} {clicks / rows:.4f}" in table
    assert "the test part has no clicks of the goal 'buy', so it has no AUC" in said
    assert "clicks of the columns are those of the first goal, 'click'" in said


def test_bad_labels_of_a_goal_are_reported(tmp_path):
    frame = goal_log(60)
    frame["clicked"] = frame["clicked"].astype(object)
    frame.loc[7, "clicked"] = "perhaps"
    # A cell of one of several goals may be empty.
    frame.loc[8, "clicked"] = " "
    with pytest.raises(
        Exception, match=r"line 9, column clicked: found 'perhaps'; write .*`click: {"
    ):
        table(tmp_path, frame, SCHEMA, **RANDOM)


def test_minus_one_is_zero_in_each_goal(tmp_path):
    schema = "label: {a: p, b: q}\nids: [user]\n"
    frame = pd.DataFrame({"user": range(40), "p": [-1, 1] * 20, "q": [1.0, np.nan, -1, 0.25] * 10})
    with pytest.raises(Exception, match=r"column q: found labels -1 and 0\.25"):
        table(tmp_path, frame, schema, **RANDOM)
    frame["q"] = [1.0, np.nan, -1, -1] * 10
    found, _ = arrays_of(table(tmp_path, frame, schema, **RANDOM), "train")
    assert set(found["label"][:, 0].tolist()) == {0.0, 1.0}
    assert set(found["label"][~np.isnan(found["label"][:, 1]), 1].tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("left_out", [[], ["clicked"], ["clicked", "price_paid"]])
def test_a_log_to_score_may_lack_labels(tmp_path, left_out):
    frame, path = goal_log(50), tmp_path / "log.csv"
    frame.drop(columns=left_out).to_csv(path, index=False)
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    log = scoring_log(load_schema(tmp_path / "schema.yaml"), [path])
    (chunk,) = log.chunks(BadRows("error"))
    expected = expected_labels(frame)
    expected[:, [name in left_out for name in ("clicked", "price_paid")]] = np.nan
    np.testing.assert_array_equal(labels_of(chunk.frame, ["click", "buy"]), expected)
    assert list(log.schema.label) == [
        goal for goal, name in (("click", "clicked"), ("buy", "price_paid")) if name not in left_out
    ]
