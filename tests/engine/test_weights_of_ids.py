"""Fields whose ids have weights: wherever they are read, stored and scored."""

import json

import numpy as np
import onnxruntime
import pandas as pd
import pytest
from sklearn.metrics import log_loss

from stampede import open_run
from stampede.data import DataError
from stampede.engine.checkpoint.retention import newest
from stampede.engine.inference import export_command as export
from stampede.engine.tables import read_field
from support.jobs import lines
from support.packages import loaded, onnx_inputs
from support.periods import period, train, write_frames
from support.shop import shop, train_on_shop, write_shop

SCHEMA = """
label: clicked
ids:
  user: {min_count: 1}
  item: {min_count: 3}
  history: {separator: "|", max_ids: 4, keep: last, share: item, pooling: mean, weights: times}
  bought: {column: history, separator: "|", min_count: 2, weights: times}
  town: {encode: hash, buckets: 9, seed: 3}
  towns: {separator: json, share: town, weights: shares}
  seen: {column: history, separator: "|", share: item, pooling: attention, query: item}
"""
POOLED = SCHEMA[: SCHEMA.index("  seen:")]
# Without layers that training shapes, a score is a sum of first-order weights.
LINEAR = ["model.name=lr", "model.dim=2", "train.epochs=2"]


def weighted_shop(rows=600, seed=5):
    """The shop's log with weights of histories and towns, some negative, some 0."""
    frame, draw = shop(rows, seed=seed), np.random.default_rng(seed)

    def drawn(count):
        return (draw.integers(-3, 6, count) / 4).tolist()

    counts = frame["history"].map(lambda cell: len(cell.split("|")) if cell else 0)
    frame["times"] = ["|".join(map(str, drawn(count))) for count in counts]
    frame["shares"] = [json.dumps(drawn(len(json.loads(cell)))) for cell in frame["towns"]]
    return frame


@pytest.fixture(scope="module", params=["pooled", "apart"])
def trained(request, tmp_path_factory):
    """With tables that TorchRec pools; and with one that a history attends to."""
    schema = POOLED if request.param == "pooled" else SCHEMA
    folder = write_shop(tmp_path_factory.mktemp("shop"), schema, weighted_shop())
    return train_on_shop(folder, *LINEAR)


@pytest.fixture(scope="module")
def rows_to_score():
    frame = weighted_shop(40, seed=8).drop(columns="clicked").astype(str)
    frame.loc[0, ["history", "times"]] = ["i1|new|i0|NA|i2|i3|i4", "1|2|0.5||-1|.25|3"]
    frame.loc[1, ["history", "times", "towns", "shares"]] = ["", "", "[]", "[]"]
    return frame


def by_hand(run, frame):
    """Logits as sums of first-order weights, from the ids and weights of the cells."""
    model = open_run(run)
    names = {name: model.embeddings(name).index for name in ("item", "user", "bought")}
    checkpoint = newest(run / "checkpoints")
    weights = {
        name: read_field(checkpoint, name).first_order.squeeze(1).numpy().astype(float)
        for name in (*names, "town")
    }

    def of(name, text):
        known = dict(zip(names[name], weights[name], strict=True))
        return known.get(text, known["<rare or unseen>"])

    def cell(name, row, most=None, mean=False):
        ids, factors = row["history"].split("|"), row["times"].split("|")
        pairs = [(i, float(f)) for i, f in zip(ids, factors, strict=True) if i not in ("", "NA")]
        pairs = pairs[-most:] if most else pairs
        if not pairs:
            return dict(zip(names[name], weights[name], strict=True))["<missing>"]
        return sum(of(name, i) * f for i, f in pairs) / (len(pairs) if mean else 1)

    found = []
    for _, row in frame.iterrows():
        logit = of("item", row["item"]) + of("user", row["user"])
        logit += cell("item", row, 4, mean=True) + cell("bought", row)
        found.append(logit)
    return np.array(found)


@pytest.mark.wide
def test_weights_multiply_and_means_divide_by_the_number_of_ids(trained, rows_to_score):
    """Of all rows that differ in nothing else, and with the missing value's weight 1."""
    scores = open_run(trained).score(rows_to_score)
    logits = np.log(scores / (1 - scores))
    # Towns, hashed, are left out: they are the same in both frames.
    other = rows_to_score.copy()
    other[["history", "times", "item", "user"]] = "", "", "i1", "u1"
    without = open_run(trained).score(other)
    difference = logits - np.log(without / (1 - without))
    expected = by_hand(trained, rows_to_score) - by_hand(trained, other)
    if "seen" in open_run(trained).fields:
        pytest.skip("a unit of attention adds to the logit")
    np.testing.assert_allclose(difference, expected, atol=1e-5)
    assert np.abs(expected).std() > 0.05


@pytest.mark.slow
def test_packages_score_as_the_run(trained, rows_to_score, tmp_path):
    expected = open_run(trained).score(rows_to_score)
    assert export.main([str(trained), str(tmp_path / "package")]) == 0
    columns = {name: rows_to_score[name].tolist() for name in rows_to_score}
    model = loaded(tmp_path / "package")
    np.testing.assert_allclose(model.score(columns), expected, atol=1e-6)
    lists = pd.DataFrame(columns)
    lists["times"] = [
        [float(one or 1) for one in t.split("|")] if t else [] for t in lists["times"]
    ]
    lists["history"] = [cell.split("|") if cell else [] for cell in lists["history"]]
    for scored in (model.score(lists), open_run(trained).score(lists)):
        np.testing.assert_allclose(scored, expected, atol=1e-6)
    with pytest.raises(ValueError, match=r"column times: .*2 weights for 3 ids in column history"):
        model.score({**columns, "history": ["a|b|c"] * 40, "times": ["1|2"] * 40})
    with pytest.raises(ValueError, match=r"column times: found '1.*write finite numbers"):
        model.score({**columns, "history": ["a|b"] * 40, "times": ["1|inf"] * 40})
    plain = model.score({**columns, "times": ["nan"] * 40}, on_bad_value="missing")
    ones = ["|".join(["1"] * len(c.split("|"))) if c else "" for c in columns["history"]]
    np.testing.assert_allclose(plain, model.score({**columns, "times": ones}))


@pytest.mark.wide
@pytest.mark.usefixtures("one_registry")
@pytest.mark.parametrize("trained", ["apart"], indirect=True)
def test_an_onnx_file_scores_as_the_run(trained, rows_to_score, tmp_path):
    expected = open_run(trained).score(rows_to_score)
    file = tmp_path / "model.onnx"
    assert export.main([str(trained), str(file), "--format", "onnx"]) == 0
    export.main([str(trained), str(tmp_path / "package")])
    session, package = onnxruntime.InferenceSession(file), loaded(tmp_path / "package")
    columns = {name: rows_to_score[name].tolist() for name in rows_to_score}
    (found,) = session.run(["probability"], onnx_inputs(session, columns, package))
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.slow
def test_periods_are_scored_with_their_weights(tmp_path):
    days = [weighted_shop(300, seed=number) for number in (1, 2)]
    train(write_frames(tmp_path, SCHEMA, days), ["checkpoint.keep=9"])
    scores = open_run(period(tmp_path, 1)).score(tmp_path / "log2.csv")
    labels = pd.read_csv(tmp_path / "log2.csv")["clicked"].to_numpy()
    line = [line for line in lines(tmp_path / "runs/ads") if line["kind"] == "period"][1]
    assert line["logloss"] == pytest.approx(log_loss(labels, scores), rel=1e-5)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ("1|2", "line 3, column times: found '1|2'; there are 2 weights for 3 ids in column hist"),
        ("", "line 3, column times: found nothing; there are 0 weights for 3 ids in column"),
        ("1|2|inf", "line 3, column times: found '1|2|inf'; write finite numbers"),
        ("1|2|nan", "line 3, column times: found '1|2|nan'; write finite numbers"),
        ("1|two|3", "line 3, column times: found '1|two|3'; write finite numbers"),
    ],
)
def test_bad_weights_are_refused(tmp_path, times, message):
    frame = weighted_shop(60)
    frame.loc[1, ["history", "times"]] = ["i1|i2|i3", times]
    folder = write_shop(tmp_path / "shop", POOLED, frame)
    with pytest.raises(DataError) as refused:
        train_on_shop(folder, *LINEAR)
    assert f"log.csv: {message}" in str(refused.value)


def test_weights_that_are_no_json_list_are_told_so(tmp_path):
    frame = weighted_shop(60)
    frame.loc[1, ["towns", "shares"]] = ['["t1", "t2"]', "1|2"]
    folder = write_shop(tmp_path / "shop", POOLED, frame)
    with pytest.raises(DataError, match=r"line 3, column shares: found '1\|2'; write a JSON list"):
        train_on_shop(folder, *LINEAR)


WHOLE_IDS = """
label: clicked
missing: ["", NA, "1"]
ids:
  user: {min_count: 1}
  item: {encode: integer, size: 9, separator: "|", max_ids: 2, weights: times}
"""


@pytest.mark.wide
@pytest.mark.parametrize("encode", ["encode: integer, size: 9", "min_count: 1"])
def test_ids_with_a_fraction_keep_their_weights(tmp_path, encode):
    """In logs, frames and packages, with missing ids and bad ones; scores by hand."""
    frame = shop(200)[["clicked", "user"]]
    draw = np.random.default_rng(3)
    frame["item"] = [f"{a}.0|{b}" for a, b in draw.integers(2, 9, (200, 2))]
    frame["times"] = [f"{a}|{b}" for a, b in (draw.integers(-3, 6, (200, 2)) / 4)]
    schema = WHOLE_IDS.replace("encode: integer, size: 9", encode)
    run = train_on_shop(write_shop(tmp_path / "shop", schema, frame), *LINEAR)
    names = open_run(run).embeddings("item").index
    weights = read_field(newest(run / "checkpoints"), "item").first_order.squeeze(1).numpy()
    weight = dict(zip(map(str, names), weights.astype(float), strict=True))
    assert export.main([str(run), str(tmp_path / "package")]) == 0
    package = loaded(tmp_path / "package")
    rows = pd.DataFrame({
        "user": ["u1"] * 4,
        "item": [[5.0, 2.0], [1.0, 3.0], [4.0, 4.0], [2.0, 7.0]],
        "times": [[0.5, 3.0], [4.0, -0.5], [0.25, 0.5], [1.0, 0.0]],
    })  # fmt: skip
    sums = [0.5 * weight["5"] + 3 * weight["2"], -0.5 * weight["3"], 0.75 * weight["4"]]
    expected = np.array([*sums, weight["2"]])
    for score in (open_run(run).score, package.score):
        scores = score(rows)
        logits = np.log(scores / (1 - scores))
        np.testing.assert_allclose(logits - logits[3], expected - expected[3], atol=1e-5)
    if "integer" in encode:
        # Ids are counted before bad ones are left out.
        texts = {"user": ["u1"] * 2, "item": ["x|2|3", "2"], "times": ["9|2|4", "2"]}
        scores = package.score(texts, on_bad_value="missing")
        assert scores[0] == pytest.approx(scores[1])
