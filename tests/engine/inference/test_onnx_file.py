"""A file of ONNX scores columns of the log in onnxruntime as the trainer does."""

import json
import re
import sys

import numpy as np
import onnx
import pandas as pd
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnxruntime import InferenceSession
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from stampede.engine.inference import export_command as command
from stampede.engine.inference import onnx_file
from stampede.engine.inference.onnx_file import Field, described_inputs
from stampede.engine.inference.packaging import export
from stampede.engine.inference.trained import open_trained
from support.jobs import run_small
from support.movie_runs import train_on_movies
from support.packages import loaded, open_test_part
from support.paths import ROOT
from support.predicting import refused, run_command, scores

pytestmark = pytest.mark.usefixtures("one_registry")


def written(run, folder, *options):
    """The session of what the command wrote, and what it said."""
    path = folder / "model.onnx"
    status, said = run_command(command.main, run, path, "--format", "onnx", *options)
    assert status == 0, said
    return InferenceSession(path, providers=["CPUExecutionProvider"]), said


def logits(session, inputs):
    """Logits, whose probabilities are the other output."""
    probability, logit = session.run(["probability", "logit"], inputs)
    assert probability.dtype == logit.dtype == np.float32
    np.testing.assert_allclose(probability, 1 / (1 + np.exp(-logit)), atol=1e-6, rtol=0)
    return logit


def seconds(times):
    """Since 1970."""
    return (pd.to_datetime(pd.Series(times)).astype("datetime64[s]").astype("int64")).tolist()


def described(session):
    """Its inputs, as the file describes them."""
    return json.loads(session.get_modelmeta().custom_metadata_map["inputs"])


def inputs_of(session, columns, rows):
    """What a session takes for columns of a log.

    Args:
        columns: values by column; lists, or None, where a sample may have several ids.
        rows: of fields' tables, by field.
    """
    found = {}
    for one in described(session):
        if one["kind"] == "row":
            found[one["name"]] = rows[one["fields"][0]]
            continue
        kind, missing = (object, "") if one["kind"] == "text" else (np.int64, -1)
        values = columns[one["column"]]
        if one["kind"] == "number":
            numbers = pd.to_numeric(pd.Series(values, dtype=object), errors="coerce")
            found[one["name"]] = numbers.to_numpy(float)
        elif one["multi"]:
            values = [value or [] for value in values]
            most = max(map(len, values), default=0)
            values = [value + [missing] * (most - len(value)) for value in values]
            found[one["name"]] = np.array(values, dtype=kind).reshape(len(values), most)
        else:
            values = [missing if value is None else value for value in values]
            found[one["name"]] = np.array(values, dtype=kind)
    return found


def as_of_log(columns, model, session):
    """What a session takes for columns of movies; a package computes rows of tables."""
    fields = [one["fields"][0] for one in described(session) if one["kind"] == "row"]
    rows = model._encoder.rows(columns, fields)
    lists = [text.split("|") if isinstance(text, str) else text for text in columns["genres"]]
    of_log = {**columns, "genres": lists, "when": seconds(columns["when"])}
    return inputs_of(session, of_log, rows)


@pytest.fixture(scope="module")
def model(packages):
    return loaded(packages / "fp32")


@pytest.fixture(scope="module")
def replaced(trained_run, tmp_path_factory):
    """The session of a file that has taken the place of another one, and its path."""
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    path.write_text("mine")
    return written(trained_run, path.parent, "--overwrite")[0], path


@pytest.fixture(scope="module")
def session(replaced):
    return replaced[0]


@pytest.mark.slow
def test_scores_are_those_of_predict(session, model, trainers):
    columns, expected = trainers
    inputs = as_of_log(columns, model, session)
    assert inputs["genres"].shape == (60, 3) and inputs["user"].dtype == object
    np.testing.assert_allclose(logits(session, inputs), expected, atol=1e-6, rtol=0)
    assert expected.std() > 0.05
    for rows in (slice(4, 5), slice(0, 0)):
        some = {name: values[rows] for name, values in inputs.items()}
        np.testing.assert_allclose(logits(session, some), expected[rows], atol=1e-6, rtol=0)


@pytest.mark.wide
def test_narrow_rows_are_those_of_the_package(trained_run, packages, trainers, tmp_path):
    kind = "int8"
    session, said = written(trained_run, tmp_path, "--rows", kind)
    assert f"7 tables in {kind}" in said
    columns, exact = trainers
    expected = loaded(packages / kind).logits(columns)
    found = logits(session, as_of_log(columns, loaded(packages / kind), session))
    np.testing.assert_allclose(found, expected, atol=1e-6, rtol=0)
    assert abs(found - exact).max() > 1e-6


@pytest.mark.wide
def test_larger_vocabularies_take_rows(trained_run, model, trainers, tmp_path):
    columns, expected = trainers
    session, _ = written(trained_run, tmp_path, "--most-ids", 3, "--overwrite")
    types = {one.name: one.type for one in session.get_inputs()}
    # There are 4 genres, 5 movies and more users.
    assert types["user"] == types["movie"] == types["genres"] == "tensor(int64)"
    inputs = as_of_log(columns, model, session)
    np.testing.assert_allclose(logits(session, inputs), expected, atol=1e-6, rtol=0)
    # Of a bag: padded with -1.
    assert inputs["genres"].min() == -1
    with pytest.raises(ValueError, match="no field 'town'; the fields are user, movie"):
        model._encoder.rows(columns, ["town"])


@pytest.mark.slow
def test_the_file_says_what_it_is(replaced, trained_run):
    session, path = replaced
    onnx.checker.check_model(str(path), full_check=True)
    # It does not tell where the network's Python files are.
    assert b".py" not in path.read_bytes()
    said = session.get_modelmeta().custom_metadata_map
    assert said["checkpoint"] == str(trained_run / "checkpoints/epoch_0001")
    assert (said["network"], said["rows"]) == ("deepfm", "fp32")
    inputs = {one["name"]: one for one in described(session)}
    assert {name: one["kind"] for name, one in inputs.items()} == {
        "user": "text", "movie": "text", "genres": "text", "city": "row", "slot": "integer",
        "age": "number", "when": "seconds",
    }  # fmt: skip
    assert inputs["age"]["fields"] == ["age_group", "age"] and inputs["genres"]["multi"]
    fields = {field["name"]: field for field in json.loads(said["fields"])}
    assert (fields["city"]["buckets"], fields["city"]["seed"], fields["slot"]["rows"]) == (7, 3, 13)
    assert "nan" in json.loads(said["missing"])
    shapes = {one.name: one.shape for one in session.get_inputs()}
    assert shapes["user"] == ["samples"] and shapes["genres"] == ["samples", "ids of genres"]


IDS = st.one_of(
    st.none(), st.integers(0, 70).map(str), st.sampled_from(["", "nan", "never seen", "é", "7.0"])
)
NUMBERS = st.one_of(st.none(), st.floats(), st.integers(-5, 100).map(float), st.floats(17, 80))
SAMPLES = st.lists(
    st.fixed_dictionaries(
        {
            "user": IDS,
            "movie": IDS,
            "genres": st.one_of(
                st.none(),
                st.lists(st.sampled_from(["comedy", "war", "drama", "", "western", "null"])),
            ),
            "city": st.sampled_from([None, "Köln", "Oslo", "", "Rome"]),
            "slot": st.one_of(st.none(), st.integers(-3, 15), st.just(2**62)),
            "age": NUMBERS,
            "when": st.datetimes(pd.Timestamp("1970-01-01"), pd.Timestamp("2050-01-01")).map(
                lambda time: time.strftime("%Y-%m-%d %H:%M:%S")
            ),
        }
    ),
    min_size=1,
    max_size=9,
)
LAST_SECOND_OF_A_DAY = {
    **dict.fromkeys(("user", "movie", "genres", "city", "slot", "age")),
    "when": "2004-02-01 23:59:59",
}


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(samples=SAMPLES)
@example(samples=[LAST_SECOND_OF_A_DAY])
def test_any_values_are_scored_as_by_the_package(session, model, samples):
    """A value that cannot be used is a missing one, as with `--on-bad-value missing`."""
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    expected = model.logits(columns, on_bad_value="missing")
    found = logits(session, as_of_log(columns, model, session))
    np.testing.assert_allclose(found, expected, atol=1e-6, rtol=0)


# Bags of every kind, minmax, an hour, and a column that two fields take in different ways.
EVERY_KIND = """
separator: ","
missing: ["", NA]
label: {column: y, at_least: 1.0}
ids:
  user: {min_count: 2, max_size: 5}
  tags: {separator: "|", max_ids: 2}
  tags_row: {encode: hash, buckets: 9, column: tags, separator: "|"}
  site: {encode: hash, buckets: 7, seed: 3}
  site_again: {encode: hash, buckets: 7, seed: 4, column: site}
  age: {encode: quantiles, buckets: 3, column: x}
  x_id: {column: x, min_count: 1}
  slots: {encode: integer, size: 10, column: slot, separator: +, max_ids: 3}
  hour: {encode: hour_of_day}
  weekday: {encode: weekday}
  z_bin: {encode: quantiles, buckets: 3, column: z}
numbers:
  x: {transform: [log1p, standard], fill: 1.0}
  z: {transform: minmax}
time: {column: t, format: "%Y-%m-%d %H"}
"""


@pytest.mark.wide
def test_every_kind_of_field(tmp_path):
    (tmp_path / "schema.yaml").write_text(EVERY_KIND)
    i = pd.Series(range(200))
    frame = pd.DataFrame(
        {
            "y": i % 3,
            "user": "u" + (i % 4).astype(str),
            "tags": ["|".join(f"t{j}" for j in range(n % 4)) for n in i],
            "site": "s" + (i % 5).astype(str),
            "slot": [f"{n % 10}+{n % 7}+{n % 3}+9" if n % 4 else "" for n in i],
            "x": [f"{n / 7:.3f}" for n in i],
            "z": [str(n) if n % 6 else "NA" for n in i],
            "t": [f"2024-01-{1 + n % 28:02d} {n % 24:02d}" for n in i],
        }
    )
    frame.to_csv(tmp_path / "log.csv", index=False)
    (tmp_path / "movies.yaml").write_text("")
    options = ["model.name=dcnv2", "model.options.layers=2", "model.init_std=0.3"]
    options += ["data.numbers_dtype=float16", "optim.dense.lr=0.02"]
    run = train_on_movies(tmp_path, *options)
    frame = frame[::3].reset_index(drop=True)
    frame.loc[0, ["user", "tags", "site", "x", "z"]] = ["new", "t0|new|t1", "", "", "NA"]
    frame.to_csv(tmp_path / "new.csv", index=False)
    expected = scores(run, [tmp_path / "new.csv"], tmp_path)["score"].to_numpy()
    export(open_trained(run), tmp_path / "package", "fp32", overwrite=False)
    session, _ = written(run, tmp_path)
    # `x` is a number, and text for another field, which cannot have its name.
    names = {one.name: one.type for one in session.get_inputs()}
    assert {names["x"], names["x_"]} == {"tensor(double)", "tensor(string)"}
    columns = {name: frame[name].tolist() for name in frame}
    rows = loaded(tmp_path / "package")._encoder.rows(columns, ["site", "site_again", "tags_row"])
    lists = {"tags": "|", "slot": "+"}
    for name, separator in lists.items():
        columns[name] = [cell.split(separator) if cell else [] for cell in columns[name]]
    columns["slot"] = [[int(cell) for cell in cells] for cells in columns["slot"]]
    columns["t"] = seconds(frame["t"] + ":00")
    # Of the forms of whole numbers, a file knows 3 and 3.0.
    columns["x"] = [cell.replace(".000", ".0") for cell in columns["x"]]
    inputs = inputs_of(session, columns, rows)
    assert inputs["tags_row"].shape[1] == 3
    found = 1 / (1 + np.exp(-logits(session, inputs).astype(np.float64)))
    np.testing.assert_allclose(found, expected, atol=1e-6, rtol=0)
    assert expected.std() > 0.02


@pytest.mark.wide
def test_rows_of_tables_without_a_missing_one(tmp_path):
    run_small(tmp_path, ["model.name=dlrm"])
    run = tmp_path / "small"
    expected = scores(run, ["@run"], tmp_path)["score"].to_numpy()[:50]
    drawn, (session, _) = open_test_part(run), written(run, tmp_path)
    names = [one.name for one in session.get_inputs()]
    inputs = {name: drawn.ids[:, i].numpy() for i, name in enumerate(names[: drawn.ids.shape[1]])}
    numbers = names[drawn.ids.shape[1] :]
    inputs |= {name: drawn.dense[:, i].double().numpy() for i, name in enumerate(numbers)}
    (found,) = session.run(["probability"], inputs)
    np.testing.assert_allclose(found, expected, atol=1e-6, rtol=0)
    for wrong in (-1, 10**9):
        with pytest.raises(InvalidArgument, match="indices element out of data bounds"):
            session.run(None, {**inputs, names[0]: np.full(50, wrong)})


def about(rows=10**6, **field):
    """Of a model with a field of one id."""
    entry = {
        "name": "C1", "rows": rows, "missing_row": None, "unseen_row": None, "multi": False,
        "column": "C1", "separator": None, "max_ids": None, "encode": "rows", "size": rows,
        "keep": "first", "pooling": "sum", "table": None,
    }  # fmt: skip
    fields = [{**entry, **field}]
    return {"fields": fields, "numbers": [], "goals": [], "missing": [""], "dim": 4, "time": None}


def test_a_bag_without_a_row_of_missing_values_is_a_sum():
    rows = torch.arange(15.0).reshape(3, 5)
    field = about(rows=3, multi=True)["fields"][0]
    field = Field(field, "row", {"table": rows})
    bags = torch.tensor([[2, 1, 2], [-1, -1, 3], [-1, 1, -7]])
    assert torch.equal(field(bags), torch.stack([rows[1] + 2 * rows[2], rows[0] * 0, rows[1]]))
    assert not field(bags[:, :0]).any()
    kept = about(rows=3, multi=True, max_ids=2, keep="last", pooling="mean")["fields"][0]
    found = Field(kept, "row", {"table": rows})(bags)
    assert torch.equal(found, torch.stack([(rows[1] + rows[2]) / 2, rows[0] * 0, rows[1]]))


@pytest.mark.parametrize(
    "field, key, expected",
    [
        ({"name": "logit", "column": "logit"}, "name", "logit_"),
        ({"name": "probability", "column": "probability"}, "name", "probability_"),
        ({"encode": "quantiles", "edges": [0.5] * 1024}, "kind", "number"),
        ({"encode": "quantiles", "edges": [0.5] * 1025}, "kind", "row"),
    ],
)
def test_columns_named_as_outputs_and_many_buckets(field, key, expected):
    (described,), _ = described_inputs(about(**field), 10)
    assert described[key] == expected


def test_mistakes_are_told_in_a_sentence(trained_run, tmp_path):
    path, new = tmp_path / "model.onnx", tmp_path / "new.onnx"
    path.write_text("mine")
    (tmp_path / "folder.onnx").mkdir()
    for options, words in (
        ((tmp_path / "model",), "the output is an ONNX file; write a NAME.onnx"),
        ((tmp_path / "folder.onnx", "--overwrite"), "is a folder; write the name of a file"),
        ((path,), "already exists; write --overwrite"),
        ((path, "--since", tmp_path), "leave out --since or --format onnx"),
        ((new, "--most-ids", "-1"), "--most-ids: found -1; write a number of at least 0"),
    ):
        assert words in refused(command.main, tmp_path, trained_run, *options, "--format", "onnx")
    said = refused(command.main, tmp_path, trained_run, tmp_path / "package", "--most-ids", "9")
    assert "--most-ids works with --format onnx only; write --format onnx too" in said
    assert path.read_text() == "mine"


@pytest.mark.parametrize("most", [100, 9000])
def test_a_file_that_would_be_too_large(trained_run, tmp_path, monkeypatch, most):
    """A small bound in place of the 2 GB of a protobuf message: of vocabularies and of tables."""
    monkeypatch.setattr(onnx_file, "MOST_BYTES", most)
    said = refused(command.main, tmp_path, trained_run, tmp_path / "model.onnx", "--format", "onnx")
    assert f"have more than {most:,} bytes, the limit of an ONNX file" in said


@pytest.mark.wide
@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_without_a_package(trained_run, tmp_path, monkeypatch, package):
    monkeypatch.delitem(sys.modules, "stampede.engine.inference.onnx_file")
    monkeypatch.setitem(sys.modules, package, None)
    said = refused(command.main, tmp_path, trained_run, tmp_path / "model.onnx", "--format", "onnx")
    assert f"needs the package {package}, which is not installed; run: pip install onnxs" in said
    # Nothing else does.
    assert run_command(command.main, trained_run, tmp_path / "package")[0] == 0


@pytest.mark.wide
def test_the_page_shows_how_to_score(tmp_path, monkeypatch):
    """Its example in Python, with the schema of the page of schemas, and its `config.pbtxt`."""
    schemas, page = (
        (ROOT / "docs" / name).read_text("utf-8") for name in ("schema.md", "predict-export.md")
    )
    draw, rows = np.random.default_rng(0), 400
    genres = ["war", "drama", "crime"]
    frame = pd.DataFrame(
        {
            "clicked": draw.integers(0, 2, rows),
            "user": [f"u{i}" for i in draw.integers(0, 9, rows)],
            "item": [f"i{i}" for i in draw.integers(0, 9, rows)],
            "genres": ["|".join(draw.choice(genres, draw.integers(0, 4))) for _ in range(rows)],
            "price": draw.random(rows).round(3) * 40,
            "city": draw.choice(["Oslo", "Rome"], rows),
            "position": draw.integers(0, 20, rows),
            "day": "2024-03-01",
            "weight": 1,
        }
    )
    frame.to_csv(tmp_path / "log.csv", sep=";", header=False, index=False)
    (schema,) = re.findall(r"```yaml\n# shop.yaml\n(.*?)```", schemas, flags=re.S)
    (tmp_path / "schema.yaml").write_text(schema)
    (tmp_path / "movies.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    run = train_on_movies(tmp_path, "optim.dense.lr=0.02")
    (program,) = re.findall(r"```py\n(import json\n.*?)```", page, flags=re.S)
    for words in re.findall(r"^stampede export runs/shop (\S+)(.*)$", page, flags=re.M):
        assert run_command(command.main, run, words[0], *words[1].split())[0] == 0
    found = {}
    exec(compile(program, "predict-export.md", "exec"), found)
    new = "0;u7;i3;war|drama;9.5;Oslo;3;;1\n0;;never seen;;;;;;1\n"
    (tmp_path / "new.csv").write_text(new)
    expected = scores(run, [tmp_path / "new.csv"], tmp_path)["score"].to_numpy()
    np.testing.assert_allclose(found["probability"], expected, atol=1e-6, rtol=0)
    # Types and shapes, of which Triton's lack the samples.
    types = {"STRING": "string", "FP64": "double", "INT64": "int64", "FP32": "float"}
    told = re.findall(r'name: "(\w+)" data_type: TYPE_(\w+) dims: \[ (-?1) \]( reshape)?', page)
    shapes = {(name, f"tensor({types[kind]})", dim == "1") for name, kind, dim, _ in told}
    both = [*found["session"].get_inputs(), *found["session"].get_outputs()]
    assert shapes == {(one.name, one.type, len(one.shape) == 1) for one in both}
    assert all((dim == "1") == bool(reshaped) for *_, dim, reshaped in told)
