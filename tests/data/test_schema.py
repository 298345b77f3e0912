"""Schemas: what is refused, and the features that `data.features` chooses, against pandas."""

import numpy as np
import pandas as pd
import pytest

from stampede.data.schema.features import described, settled, with_features
from stampede.data.schema.schema import Schema, Vocabulary, load_schema
from stampede.settings import SettingsError
from support.prepared_arrays import arrays_of, manifest_of
from support.preparing import table

GOOD = "label: y\nids: [user]\n"
SHARED = (
    "label: y\nids: {{i: {{}}, q: {{encode: quantiles, buckets: 2}}, s: {{share: i}}, "
    "h: {{share: {}}}}}\n"
)


@pytest.mark.parametrize(
    "text, words",
    [
        ("ids: [user]", ["label: not given"]),
        ("label:\nids: [user]", ["label: not given; write the name of its column"]),
        ("label: y", ["ids: not given"]),
        ("label: y\nids: {}", ["ids: found {}"]),
        (GOOD + "idz: 3", ["idz: unknown key; did you mean 'ids'?"]),
        (GOOD + "separator: ab", ["separator: found 'ab'; write one character"]),
        (GOOD + "quote: ab", ["quote: found 'ab'"]),
        (GOOD + "columns: [y]", ["column 'user' is used but not in columns: y"]),
        (GOOD + "columns: [y, user, y]", ["a name appears twice"]),
        (GOOD + "numbers: [user]", ["'user' is an id field and a number"]),
        (GOOD + "numbers: {x: {transform: lg}}", ["numbers.x.transform.0: found 'lg'", "log1p"]),
        (GOOD + "numbers: {x: {transform: [minmax, log1p]}}", ["numbers.x", "log1p and another"]),
        (GOOD + "numbers: {x: {fil: 1}}", ["numbers.x.fil: unknown key; did you mean 'fill'?"]),
        ("label: y\nids: {u: {encode: hsh}}", ["ids.u.encode: found 'hsh'", "mean 'hash'?"]),
        ("label: y\nids: {u: {encode: hash}}", ["ids.u.buckets: not given"]),
        ("label: y\nids: {u: {min_cout: 2}}", ["ids.u.min_cout", "did you mean 'min_count'?"]),
        ("label: y\nids: {u: {max_ids: 2}}", ["ids.u", "max_ids without separator"]),
        ("label: y\nids: {u: {min_count: 0}}", ["ids.u.min_count: found 0"]),
        ("label: y\nids: {w: {encode: weekday}}", ["ids.w", "needs the section `time`"]),
        (SHARED.format("itm"), ["ids: h: found share: itm; write an id field", "such as i,"]),
        (SHARED.format("h"), ["ids: h: found share: h; write an id field"]),
        (SHARED.format("q"), ["ids: h: found share: q; write an id field"]),
        (SHARED.format("s"), ["h: found share: s; write an id field"]),
        (SHARED.format("i, min_count: 2"), ["h: found min_count: 2 beside share: i; leave it out"]),
        (SHARED.format("i, encode: hash"), ["h: found encode: hash beside share: i; leave it"]),
        ("label: y\nids: {a: {share: b}, b: {share: a}}", ["share: b; write an id field"]),
        ("label: y\nids: {a: {share: b}}", ["share: b; write an id field"]),
        ("label: y\nids: {u: {keep: last}}", ["ids.u", "keep: last without max_ids; write both"]),
        ("label: y\nids: {u: {pooling: mean}}", ["ids.u", "pooling: mean without separator"]),
        ("label: y\nids: {u: {separator: '|', pooling: max}}", ["ids.u.pooling: found 'max'"]),
        ("label: y\nids: {u: {weights: w}}", ["ids.u", "weights: w without separator"]),
        (
            "label: y\nids: {i: {}, u: {separator: '|', weights: w, pooling: attention, query: i}}",
            ["ids.u", "weights: w with pooling: attention; write pooling: sum or mean"],
        ),
        ("label: y\nids: {../u: {}}", ["field '../u': write letters, digits"]),
        ("label: y\nids: [user", ["line 3: not valid YAML"]),
    ],
)
def test_mistakes_name_the_key_and_the_remedy(tmp_path, text, words):
    path = tmp_path / "schema.yaml"
    path.write_text(text + "\n")
    with pytest.raises(SettingsError) as raised:
        load_schema(path)
    assert str(raised.value).startswith(str(path))
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_fields_that_share_are_written_as_the_table_they_use():
    ids = {"i": {"encode": "hash", "buckets": 9}, "h": {"share": "i", "separator": "|"}, "u": {}}
    schema = Schema(label="y", ids=ids)
    assert (schema.ids["h"].encode, schema.ids["h"].buckets) == ("hash", 9)
    written = schema.model_dump(mode="json")
    assert Schema.model_validate(written) == schema
    # The names of folders that were prepared without the key do not change.
    assert "share" not in written["ids"]["u"] and written["ids"]["h"]["share"] == "i"


SCHEMA = """
label: y
ids: {user: {}, item: {min_count: 1}}
numbers: {price: {}, level: {}, given: {bins: 0}}
time: {column: t, format: seconds}
"""
ROWS = 12_000


def test_what_auto_makes_of_a_log(tmp_path):
    """Of a skewed and a symmetric number, and many ids that are seen once."""
    draw = np.random.default_rng(5)
    frame = pd.DataFrame(
        {
            "y": draw.integers(0, 2, ROWS),
            "user": [f"u{x}" for x in draw.zipf(1.4, ROWS) % 9000],
            "item": [f"i{x}" for x in draw.integers(0, 9000, ROWS)],
            "price": np.round(draw.lognormal(3, 1.5, ROWS), 2),
            "level": np.round(draw.normal(0, 2, ROWS), 3),
            "given": draw.integers(0, 9, ROWS),
            "t": 1_700_000_000 + 600 * np.arange(ROWS),
        }
    )
    frame.loc[draw.random(ROWS) < 0.1, "price"] = np.nan
    out = table(tmp_path, frame, SCHEMA, features="auto", validation_fraction=0.0)
    manifest, train = manifest_of(out), frame[: int(0.9 * ROWS)]
    names = [field["name"] for field in manifest["fields"]]
    assert names == ["user", "item", "price_bin", "level_bin", "hour_of_day", "weekday"]
    rows = {field["name"]: field["rows"] for field in manifest["fields"]}
    seen = train["user"].value_counts()
    # Ids seen once share a row unless the schema has a `min_count`. Rows 0 and 1 belong to no id.
    assert rows["user"] == 2 + (seen >= 2).sum() < 2 + len(seen)
    assert rows["item"] == 2 + train["item"].nunique()
    arrays = [arrays_of(out, part)[0] for part in ("train", "test")]
    numbers = np.concatenate([part["numbers"] for part in arrays])
    price = np.log1p(frame["price"].fillna(0.0))
    for column, values in ((0, price), (1, frame["level"])):
        of_train = values[: len(train)]
        expected = (values - of_train.mean()) / of_train.std(ddof=0)
        np.testing.assert_allclose(numbers[:, column], expected, rtol=1e-4, atol=1e-5)
    ids = np.concatenate([part["ids"] for part in arrays])
    assert (ids[frame["price"].isna(), 2] == 0).all() and rows["price_bin"] == 41
    shares = np.bincount(ids[: len(train), 2])[1:] / train["price"].notna().sum()
    np.testing.assert_allclose(shares, 1 / 40, atol=0.002)
    np.testing.assert_array_equal(ids[:, 4], frame["t"] // 3600 % 24)


SINGLES = {"few": 300, "many": 400}


@pytest.mark.parametrize("given", ["nowhere", "schema", "options"])
def test_a_fields_rare_ids_share_a_row_only_if_they_are_many(tmp_path, given):
    """Of 10,800 training rows, 3 % are 324."""
    common = np.arange(ROWS) % 50
    singles = {name: np.arange(ROWS) >= ROWS - count for name, count in SINGLES.items()}
    columns = {name: np.where(one, 1000 + np.arange(ROWS), common) for name, one in singles.items()}
    frame = pd.DataFrame({"y": np.arange(ROWS) % 3 == 0, **columns}).astype(int)
    least = "{min_count: 2}" if given == "schema" else "{}"
    schema = f"label: y\nids: {{few: {least}, many: {least}}}"
    # Where a field has its own, that counts.
    options = {"min_count": 2 if given == "options" else 3} if given != "nowhere" else {}
    # The test part is the first tenth, whose ids are the common ones.
    frame = frame[::-1]
    options |= {"features": "auto", "validation_fraction": 0.0}
    out = table(tmp_path, frame, schema, **options)
    rows = {field["name"]: field["rows"] for field in manifest_of(out)["fields"]}
    few = SINGLES["few"] if given == "nowhere" else 0
    assert rows == {"few": 2 + 50 + few, "many": 2 + 50}


@pytest.mark.parametrize("rows, least", [(500, 1), (10_000, 2), (2_000_000, 2), (40_000_000, 10)])
def test_min_count_grows_with_the_log(rows, least):
    schema = settled(with_features(Schema(label="y", ids=["a"]), "auto"), rows, {})
    assert isinstance(schema.ids["a"], Vocabulary) and schema.ids["a"].min_count == least
    said = "every id has a row" if least == 1 else f"ids seen fewer than {least} times share a row"
    assert described(schema) == said


@pytest.mark.parametrize(
    "tail, transform",
    [
        ((0.0, 1000.0, 10.0), ["log1p", "standard"]),
        ((-3.0, 1000.0, 10.0), ["log1p", "standard"]),
        ((-50.0, 1000.0, 10.0), ["standard"]),
        ((-4.0, 4.0, 0.01), ["standard"]),
        ((0.0, 1.0, 0.5), ["standard"]),
        ((0.0, 0.0, 0.0), ["standard"]),
    ],
)
def test_skewed_numbers_get_a_logarithm(tail, transform):
    schema = Schema(label="y", ids=["a"], numbers=["x"])
    assert settled(schema, 100, {"x": tail}).numbers["x"].transform == transform


def test_a_bin_whose_name_is_taken():
    schema = Schema(label="y", ids=["a", "x_bin"], numbers=["x"])
    with pytest.raises(
        SettingsError, match=r"numbers\.x: its bins would be the field 'x_bin'.*bins: 0"
    ):
        with_features(schema, "auto")
    paper = with_features(schema, "paper")
    assert list(paper.ids) == ["a", "x_bin"] and paper.numbers["x"].transform == ["minmax"]


@pytest.mark.parametrize(
    ("history", "said"),
    [
        (
            {"pooling": "attention", "query": "itm"},
            "ids.history: found query: itm; write an id field that is no history: item",
        ),
        (
            {"pooling": "attention", "query": "price"},
            "found query: price; write an id field",
        ),
        (
            {"pooling": "none", "query": "history"},
            "found query: history; write an id field",
        ),
        ({"pooling": "attention"}, "found pooling: attention without query; write both"),
        ({"query": "item"}, "found query: item without pooling: attention; write both"),
        (
            {"pooling": "attention", "query": "item", "separator": None},
            "found pooling: attention without separator",
        ),
        ({"share": "last"}, "found share: last; write an id field"),
    ],
)
def test_histories_that_cannot_be(history, said):
    ids = {"item": {}, "last": {"share": "item"}, "history": {"separator": "|", **history}}
    with pytest.raises(ValueError, match=said):
        Schema.model_validate({"label": "clicked", "ids": ids, "numbers": ["price"]})
