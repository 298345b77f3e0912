"""The table of quality: all have the same rows, ours are launched, and what is measured is kept."""

import gzip
import json
import sys
from argparse import Namespace

import numpy as np
import pytest
import torch

from stampede.data.prepare import prepare
from stampede.data.prepared.reader import open_prepared
from stampede.data.sources import open_source
from stampede.engine.config.load import load_config

ROWS = 900


def written(folder, name):
    """A log in Criteo's or Avazu's layout; the label depends on one id and, in Criteo, a number."""
    from quality import LOGS

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
        columns = [c for c in LOGS["avazu"][2].ids if c not in ("hour_of_day", "weekday")]
        lines = [",".join(["id", "click", "hour", *columns])]
        for i in range(ROWS):
            cells = [str(i), str(label[i]), f"141021{number[i] % 24:02d}"]
            lines.append(",".join([*cells, *map(str, ids[i, : len(columns)])]))
    text = "\n".join(lines) + "\n"
    (folder / LOGS[name][0]).write_bytes(gzip.compress(text.encode()))
    return text


def subsets(folder, name, **given):
    from quality import write_subsets

    written(folder, name)
    options = {"subsets": ["whole"], "draws": 1, "quick": False, "data": folder, **given}
    return list(write_subsets(name, Namespace(**options), folder))


@pytest.mark.parametrize("name", ["criteo", "avazu"])
def test_all_have_the_rows_that_the_launcher_has(tmp_path, name):
    from peers.raw_logs import read_rows
    from quality import LOGS, TABLE

    (rows,) = subsets(tmp_path, name)
    read = read_rows(name, rows.file, np.load(rows.file.with_suffix(".npy")))
    schema = rows.file.with_suffix(".yaml")
    for config, more in ((LOGS[name][1], []), (TABLE, [f"data.schema_file={schema}"])):
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
    whole, half, other, fifth, last = subsets(
        tmp_path, "avazu", subsets=["whole", "half", "fifth"], draws=2
    )
    names = [rows.name for rows in (whole, half, other, fifth, last)]
    assert names == ["whole", "half 1", "half 2", "fifth 1", "fifth 2"]
    assert whole.file.read_text() == written(tmp_path, "avazu")
    numbers = {}
    for rows in (half, other, fifth):
        head, *lines = rows.file.read_text().splitlines()
        assert head.startswith("id,click,hour,C1,banner_pos,site_id")
        numbers[rows.name] = [int(line.split(",")[0]) for line in lines]
        assert numbers[rows.name] == sorted(set(numbers[rows.name]))
        assert set(lines) <= set(whole.file.read_text().splitlines())
    assert len(numbers["half 1"]) == ROWS // 2 and len(numbers["fifth 1"]) == ROWS // 5
    assert numbers["half 1"] != numbers["half 2"]
    assert len({rows.digest for rows in (whole, half, other, fifth, last)}) == 5


def test_tokens_are_columns_with_values():
    import polars as pl
    from peers.raw_logs import Rows, tokens

    frame = pl.DataFrame(
        {f"I{i}": [str(i), "-2", None] for i in range(1, 14)}
        | {f"C{i}": ["a", None, "b"] for i in range(1, 27)}
    )
    found = tokens(Rows("criteo", frame, np.zeros(3), np.zeros(3)))
    assert found["I3"].to_list() == ["I3=2", "I3=0", "I3=m"]
    assert found["C26"].to_list() == ["C26=a", "C26=", "C26=b"] and found.width == 39
    frame = pl.DataFrame({"id": ["7"], "click": ["1"], "hour": ["14102923"], "C1": ["1005"]})
    found = tokens(Rows("avazu", frame, np.zeros(1), np.zeros(1)))
    assert found.rows() == [("hour=23", "C1=1005")]


def test_trees_see_frequencies_of_the_training_part_only():
    import polars as pl
    from peers.raw_logs import Rows, tree_inputs

    frame = pl.DataFrame(
        {"hour": ["14102905"] * 6, "C1": ["a", "b", "b", "b", "a", "c"]},
    )
    parts = np.array([0, 0, 0, 1, 2, 2])
    found = tree_inputs(Rows("avazu", frame, np.zeros(6), parts))
    assert found[:, 0].tolist() == [5] * 6
    assert found[:, 1].tolist() == [1, 2, 2, 2, 1, 0]
    assert found[:, 2].tolist() == [1, 0, 0, 0, 1, 2]


@pytest.mark.soak
def test_ours_and_logistic_regression_are_measured_once(tmp_path, monkeypatch):
    import quality
    from peers.raw_logs import LR_STRENGTHS
    from report import Report

    options = Namespace(
        data=tmp_path,
        logs=["avazu"],
        peers=["lr"],
        configs=["avazu"],
        models=["lr"],
        seeds=1,
        subsets=["whole"],
        draws=1,
        python=sys.executable,
        quick=False,
    )
    written(tmp_path, "avazu")
    found, report = [], Report(tmp_path / "x.json")
    quality.measure(options, found, report, tmp_path)
    assert [row["contender"] for row in found] == ["scikit-learn LR", "avazu.yaml lr"]
    assert not [row["failed"] for row in found if "failed" in row]
    assert 0.75 < found[0]["auc"] < 0.95
    assert found[0]["chosen"]["C"] in LR_STRENGTHS
    row = found[1]
    assert 0 < row["auc"] < 1 and 0 < row["validation_auc"] < 1 and row["logloss"] > 0
    assert 1 <= row["chosen"]["epoch"] <= row["chosen"]["of"]
    assert row["seconds"] > row["train_seconds"] > 0
    monkeypatch.setattr(quality, "run_program", None)
    quality.measure(options, found, report, tmp_path)
    assert len(found) == len(json.loads((tmp_path / "x.json").read_text())["runs"]) == 2


def run(contender, auc, seed=1, **more):
    metrics = {"auc": auc, "logloss": 0.5, "validation_auc": 0.7, "seconds": 2.0}
    of_rows = {"log": "criteo", "rows": "whole", "parts": [6000, 700, 1000], "data": "d"}
    return {**of_rows, "contender": contender, "seed": seed, **metrics, **more}


def test_the_table_shows_means_and_what_failed():
    from quality import summarize, tables

    runs = [
        run("scikit-learn LR", 0.76),
        run("avazu.yaml lr", 0.75, 1),
        run("avazu.yaml lr", 0.77, 2),
        {**run("LightGBM", 0.0), "failed": "not installed: no network"},
    ]
    ours = summarize(runs)[1]
    assert ours["auc"] == pytest.approx(0.76) and ours["standard_error"] == pytest.approx(0.01)
    lines = tables({"runs": runs}).splitlines()
    assert "**criteo whole**: 6,000 training, 700 validation, 1,000 test rows" in lines
    cells = [cell.strip() for cell in lines[-2].strip("|").split("|")]
    assert cells == ["avazu.yaml lr", "2", "0.7600", "+0.0000", "0.0100", "0.5000", "0.7000", "2.0"]
    assert "failed: not installed: no network" in lines[-1]


def test_draws_are_compared_with_logistic_regression_on_the_same_rows():
    from quality import summarize, tables

    aucs = {"half 1": (0.70, 0.71, 0.73), "half 2": (0.60, 0.60, 0.60)}
    runs = [
        run(name, auc, seed, rows=rows)
        for rows, (lr, *ours) in aucs.items()
        for seed, (name, auc) in enumerate(
            [("scikit-learn LR", lr), ("avazu.yaml lr", ours[0]), ("avazu.yaml lr", ours[1])]
        )
    ]
    lr, ours = summarize(runs)
    assert lr["auc"] == pytest.approx(0.65) and lr["standard_error"] is None
    assert ours["auc"] == pytest.approx(0.66) and (ours["runs"], ours["draws"]) == (4, 2)
    # On one draw 0.02 above, on the other equal: half their distance from the mean.
    assert ours["above_lr"] == pytest.approx(0.01)
    assert ours["standard_error"] == pytest.approx(0.01)
    head = "**criteo half**: 6,000 training, 700 validation, 1,000 test rows, 2 draws"
    assert head in tables({"runs": runs})


def test_the_main_sample_has_all_networks(tmp_path):
    from quality import CONFIGS, MODELS, contenders

    (whole,) = subsets(tmp_path, "criteo")
    (half,) = subsets(tmp_path, "criteo", subsets=["half"])
    peers = ["lr", "lightgbm", "fuxictr"]
    names = [one.name for one in contenders(whole, peers, CONFIGS, None)]
    assert names[0] == "scikit-learn LR" and names[-2:] == ["LightGBM", "FuxiCTR DeepFM"]
    assert names[1:-2] == [*(f"criteo_kaggle.yaml {m}" for m in MODELS), "table.yaml deepfm"]
    names = [one.name for one in contenders(half, ["lightgbm"], CONFIGS, None)]
    assert names == ["criteo_kaggle.yaml deepfm", "table.yaml deepfm", "LightGBM"]
    named = contenders(half, [], ["criteo_kaggle"], ["lr", "deepfm"])
    assert "model.name=lr" in named[0].overrides
    # The configuration's own network is not named: it is unchanged.
    assert not [key for key in named[1].overrides if key.startswith("model")]
