"""The table of quality: all have the same rows, ours are launched, and what is measured is kept."""

import gzip
import json
import sys
from argparse import Namespace

import numpy as np
import polars as pl
import pytest
import quality
import torch
from peers.raw_logs import LAYOUTS, LR_STRENGTHS, Layout, Rows, read_rows, tokens, tree_inputs
from quality import LOGS, TABLE, summarize, write_subsets
from report import Report

from stampede.data.prepare import prepare
from stampede.data.prepared.reader import open_prepared
from stampede.data.sources import open_source
from stampede.engine.config.load import load_config

ROWS = 900


def written(folder, name):
    """A log in Criteo's or Avazu's layout; the label depends on one id and, in Criteo, a number."""
    draw = np.random.default_rng(5)
    ids = draw.integers(0, 6, (ROWS, 30))
    number = draw.integers(0, 50, ROWS)
    chance = np.where(ids[:, 0] < 2, 0.85, 0.15) + 0.002 * (number - 25)
    label = (draw.random(ROWS) < chance).astype(int)
    if name == "criteo":
        lines = [
            "\t".join(
                [str(label[i]), str(number[i]), *[""] * 12, *(f"{x:08x}" for x in ids[i, :26])]
            )
            for i in range(ROWS)
        ]
    else:
        columns = [c for c in LOGS["avazu"].schema.ids if c not in ("hour_of_day", "weekday")]
        lines = [",".join(["id", "click", "hour", *columns])]
        for i in range(ROWS):
            cells = [str(i), str(label[i]), f"141021{number[i] % 24:02d}"]
            lines.append(",".join([*cells, *map(str, ids[i, : len(columns)])]))
    text = "\n".join(lines) + "\n"
    (folder / LOGS[name].file).write_bytes(gzip.compress(text.encode()))
    return text


def subsets(folder, name, **given):
    written(folder, name)
    options = {"subsets": ["whole"], "draws": 1, "quick": False, "data": folder, **given}
    return list(write_subsets(name, Namespace(**options), folder))


@pytest.mark.parametrize("name", ["criteo", "avazu"])
def test_all_have_the_rows_that_the_launcher_has(tmp_path, name):
    (rows,) = subsets(tmp_path, name)
    read = read_rows(name, rows.file, np.load(rows.file.with_suffix(".npy")))
    schema = rows.file.with_suffix(".yaml")
    for config, more in ((LOGS[name].config, []), (TABLE, [f"data.schema_file={schema}"])):
        section = load_config(config, [f"data.path={rows.file}", *rows.split, *more]).data
        named = {"schema": section.schema_file} if more else {}
        folder = tmp_path / config.stem
        prepare(open_source(section.kind, section.path, section, **named), section, folder)
        dataset = open_prepared(folder)
        for part, name_of_part in enumerate(("train", "validation", "test")):
            samples = getattr(dataset, name_of_part)
            assert samples.rows == rows.counts[part] > 0
            labels = samples.read(torch.arange(samples.rows)).label.numpy()
            assert labels.tolist() == read.label[read.part(part)].tolist()


def test_subsets_are_rows_of_the_log_in_their_order(tmp_path):
    found = subsets(tmp_path, "avazu", subsets=["whole", "half", "fifth"], draws=2)
    assert [one.name for one in found] == ["whole", "half 1", "half 2", "fifth 1", "fifth 2"]
    head, *whole = written(tmp_path, "avazu").splitlines()
    for one, share in zip(found, (1, 2, 2, 5, 5), strict=True):
        first, *lines = one.file.read_text().splitlines()
        assert first == head and len(lines) == ROWS // share
        assert lines == [line for line in whole if line in set(lines)]
    assert len({one.digest for one in found}) == 5


def test_trees_see_frequencies_of_the_training_part_only(monkeypatch):
    frame = pl.DataFrame({"hour": ["14102905"] * 6, "C1": ["a", "b", "b", "b", "a", "c"]})
    frame = frame.with_columns(genres=pl.Series(["x|y", "", "y", "x", "x", "y"]))
    parts = np.array([0, 0, 0, 1, 2, 2])
    hour = {"hour": pl.col("hour").str.slice(6, 2)}
    layout = Layout(pl.lit(True), ["C1"], lists={"genres": "|"}, times=hour)
    monkeypatch.setitem(LAYOUTS, "small", layout)
    rows = Rows("small", frame, np.zeros(6), parts)
    found = tree_inputs(rows)
    # Of the genres "", x and y.
    assert found[:, 1:4].astype(int).tolist()[:3] == [[0, 1, 1], [1, 0, 0], [0, 0, 1]]
    found = np.delete(found, [1, 2, 3], 1)
    assert next(tokens(rows)) == ["hour=05", "C1=a", "genres=x", "genres=y"]
    assert found[:, 0].tolist() == [5] * 6
    assert found[:, 1].tolist() == [1, 2, 2, 2, 1, 0]
    assert found[:, 2].tolist() == [1, 0, 0, 0, 1, 2]


@pytest.mark.soak
def test_ours_and_logistic_regression_are_measured_once(tmp_path, monkeypatch):
    options = Namespace(
        data=tmp_path,
        logs=["avazu"],
        peers=["lr"],
        configs=["avazu"],
        models=["lr"],
        batches=[],
        seeds=1,
        subsets=["whole"],
        draws=1,
        python=sys.executable,
        quick=False,
    )
    written(tmp_path, "avazu")
    found, report = [], Report(tmp_path / "x.json")
    quality.measure(options, found, report, tmp_path)
    theirs, ours = found
    assert (theirs["contender"], ours["contender"]) == ("scikit-learn LR", "avazu.yaml lr")
    assert 0.75 < theirs["auc"] < 0.95 and theirs["chosen"]["C"] in LR_STRENGTHS
    assert 0 < ours["auc"] < 1 and ours["seconds"] > ours["train_seconds"] > 0
    monkeypatch.setattr(quality, "run_program", None)
    quality.measure(options, found, report, tmp_path)
    assert len(found) == len(json.loads((tmp_path / "x.json").read_text())["runs"]) == 2


def test_draws_are_compared_with_logistic_regression_on_the_same_rows():
    def run(rows, contender, seed, auc):
        metrics = {"auc": auc, "logloss": 0.5, "validation_auc": 0.7, "seconds": 2.0}
        of = {"log": "criteo", "rows": rows, "parts": [6000, 700, 1000], "data": "d"}
        return {**of, "contender": contender, "seed": seed, **metrics}

    aucs = {"half 1": (0.70, 0.71, 0.73), "half 2": (0.60, 0.60, 0.60)}
    runs = []
    for rows, (lr, first, second) in aucs.items():
        runs.append(run(rows, "scikit-learn LR", 0, lr))
        runs += [run(rows, "avazu.yaml lr", 1, first), run(rows, "avazu.yaml lr", 2, second)]
    lr, ours = summarize(runs)
    assert lr["auc"] == pytest.approx(0.65) and lr["standard_error"] is None
    assert ours["auc"] == pytest.approx(0.66) and (ours["runs"], ours["draws"]) == (4, 2)
    # On one draw 0.02 above, on the other equal: half their distance from the mean.
    assert ours["above_lr"] == pytest.approx(0.01)
    assert ours["standard_error"] == pytest.approx(0.01)
