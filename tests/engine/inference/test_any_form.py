"""Scores do not depend on the form of the rows: files, frames, packages and ONNX."""

import json

import numpy as np
import onnxruntime
import pandas as pd
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stampede import open_run
from stampede.engine.inference.onnx_file import export_onnx
from stampede.engine.inference.packaging import export
from stampede.engine.inference.trained import open_trained
from support.any_form import FORMS, KINDS, SCHEMA, drawn, frames, write
from support.movie_runs import train_on_movies
from support.packages import loaded
from support.predicting import scores

pytestmark = pytest.mark.slow

TYPES = st.fixed_dictionaries({name: st.sampled_from(kinds) for name, kinds in KINDS.items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run on a random log, and its package."""
    folder = tmp_path_factory.mktemp("any_form")
    write(folder / "log.csv", drawn(1, 500), None)
    (folder / "schema.yaml").write_text(SCHEMA)
    (folder / "movies.yaml").write_text("")
    train_on_movies(folder, "run.name=run", "data.features=auto", "optim.dense.lr=0.02")
    export(open_trained(folder / "run"), folder / "package", "fp32", overwrite=False)
    return folder


@settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 999), form=st.sampled_from(FORMS), kinds=TYPES, floats=st.booleans())
def test_scores_of_files_and_frames(folder, tmp_path, seed, form, kinds, floats):
    columns, run = drawn(seed, 50), folder / "run"
    path = write(tmp_path / "plain.csv", columns, None)
    expected = scores(run, [path], tmp_path)["score"].to_numpy()
    assert expected.std() > 0.01
    other = write(tmp_path / f"log.{form}", columns, kinds, floats)
    assert scores(run, [other], tmp_path)["score"].to_list() == expected.tolist()
    opened, model = open_run(run), loaded(folder / "package")
    for frame in frames(columns, kinds):
        assert opened.score(frame).tolist() == expected.tolist()
        if isinstance(frame, pd.DataFrame | pl.DataFrame):
            found = model.score(frame)
            np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=str(kinds))


@pytest.fixture(scope="module")
def in_onnx(folder):
    """The run as an ONNX file, and what the file says about its inputs."""
    export_onnx(open_trained(folder / "run"), folder / "model.onnx", "fp32", overwrite=False)
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    return session, json.loads(session.get_modelmeta().custom_metadata_map["inputs"])


@pytest.mark.wide
def test_words_for_booleans_in_an_onnx_file_and_a_package(folder, in_onnx):
    session, about = in_onnx
    model, columns = loaded(folder / "package"), drawn(2, 1)
    for word, boolean in [("True", True), ("TRUE", True), ("False", False), ("FALSE", False)]:
        found = []
        for member in (word, word.lower()):
            inputs = {}
            for one in about:
                value = {"text": "", "number": np.nan, "seconds": 1772323200}.get(one["kind"], 0)
                value = member if one["column"] == "member" and one["kind"] == "text" else value
                kind = object if isinstance(value, str) else None
                inputs[one["name"]] = np.array([[value]] if one["multi"] else [value], kind)
            found.append(session.run(["logit"], inputs)[0].item())
        assert found[0] == found[1]
        # Beside a number, polars would take True for 1.
        values = [[boolean, 2], [word, "2"], [boolean, None], [np.bool_(boolean), "x"]]
        given = [
            model.logits({name: cell * 2 for name, cell in columns.items()} | {"member": one})[0]
            for one in values
        ]
        assert len(set(given)) == 1


def test_prices_on_edges_in_an_onnx_file(folder, in_onnx):
    """A float32 price, widened to the float64 of the input, falls into the bin of its text."""
    session, about = in_onnx
    prices = np.array([9.99, 0.1, 14.95, 2.5, 7.77, 3.3, 1000.01])
    model, found = loaded(folder / "package"), []
    columns = {name: [None] * len(prices) for name in model.columns}
    columns |= {"seen": ["2026-03-01"] * len(prices), "price": prices.tolist()}
    for given_prices in (prices, prices.astype(np.float32).astype(np.float64)):
        inputs = {}
        for one in about:
            missing = {"text": "", "number": np.nan}.get(one["kind"], -1)
            values = np.array([missing] * len(prices), object if missing == "" else None)
            values = given_prices if one["column"] == "price" else values
            if one["kind"] == "seconds":
                values = np.full(len(prices), pd.Timestamp("2026-03-01").timestamp(), np.int64)
            inputs[one["name"]] = values[:, None] if one["multi"] else values
        found.append(session.run(["probability"], inputs)[0])
    assert found[0].tolist() == found[1].tolist()
    np.testing.assert_allclose(found[0], model.score(columns), atol=1e-6)
    assert found[0].std() > 0.001
