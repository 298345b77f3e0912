"""The advice of a run if something looks wrong, and only then."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from stampede import configuration
from stampede.data import DataError
from stampede.data.prepared.reader import open_prepared
from stampede.engine.advice import (
    _moved_shares,
    on_batch_size,
    on_data,
    on_first_epoch,
    on_last_epoch,
    on_memory,
)
from stampede.lab.report.page import write_report
from stampede.lab.report.records import open_runs
from stampede.settings import SettingsError
from support.jobs import lines, run_small
from support.movie_runs import prepare_movies, summary_of, train_on_movies
from support.movies import movies
from support.prepared import drawn_fields, drawn_rows, write_prepared
from support.warm_starts import movie_folder

# As it is by itself.
COMPARED = "evaluate.compare_with_lr=auto"


@pytest.mark.parametrize("batch_size, rows, ranks, said", [
    (8192, 8192, 1, "only 1 step of batch 8,192: use a smaller train.batch_size, such as 128"),
    (300, 1000, 3, "only 4 steps of batch 300: use a smaller train.batch_size, such as 12"),
    (1, 40, 1, "only 40 steps of batch 1: train on more rows, or for more epochs"),
    (1024, 50 * 1024, 1, None),
    (1024, 49 * 1024 + 1, 1, None),
])  # fmt: skip
def test_few_steps(batch_size, rows, ranks, said):
    expected = [f"an epoch has {said}"] if said else []
    assert on_batch_size(batch_size, rows, ranks) == expected


@pytest.mark.slow
def test_a_batch_larger_than_the_data_is_refused(tmp_path):
    words = r"train\.batch_size: found 1,901, but the .* has 1,900 rows; write train.batch_size=32,"
    with pytest.raises(SettingsError, match=words):
        run_small(tmp_path, ["train.batch_size=1901"])
    # Nothing is in the way of the next attempt.
    run_small(tmp_path, ["train.batch_size=1900"])
    # One that the recipe chose is not refused.
    folder = movie_folder(tmp_path / "new", 14)
    run = train_on_movies(folder, "evaluate.select_on=test", "train.batch_size=null")
    summary = summary_of(run)
    assert summary["batch_size"] > summary["rows"]["train"]


def test_training_rows_of_one_class_are_refused(tmp_path):
    folder = movie_folder(tmp_path / "new")
    frame = movies(600)
    frame.loc[:400, "rating"] = 1
    frame.to_csv(folder / "log.csv", index=False)
    with pytest.raises(DataError, match=r"every label of the training part is 0 \(\d+ rows\), so"):
        train_on_movies(folder, "data.validation_fraction=0.4")
    assert not (folder / "movies").exists()


def test_parts_of_one_class(tmp_path):
    names = ("train", "validation", "test")
    parts = {name: drawn_rows(300, seed=seed) for seed, name in enumerate(names)}
    for part in names[1:]:
        parts[part]["label"][:] = 1
    told = on_data(open_prepared(write_prepared(tmp_path / "data", parts, drawn_fields())))
    for part, said in zip(names[1:], told, strict=True):
        assert f"every label of the {part} part is 1 (300 rows): check the label column" in said


@pytest.mark.parametrize(
    "clicks, told",
    [
        # Of 400 training rows: 40 of 400 against 80 is four standard errors and more.
        ({"train": 40, "validation": 80, "test": 45}, "0.1 of the training rows but 0.2 of the va"),
        ({"train": 80, "validation": 78, "test": 30}, "0.2 of the training rows but 0.075 of"),
        ({"train": 80, "validation": 70, "test": 90}, None),
        # More than four standard errors, but hardly more clicks.
        ({"train": 300, "validation": 360, "test": 300}, None),
        # Twice as many, of few.
        ({"train": 8, "validation": 16, "test": 8}, None),
    ],
)
def test_a_share_of_clicks_that_moved_is_told(tmp_path, clicks, told):
    parts = {name: drawn_rows(400, seed=seed) for seed, name in enumerate(clicks)}
    for name, count in clicks.items():
        parts[name]["label"][:] = np.arange(400) < count
    said = on_data(open_prepared(write_prepared(tmp_path / "data", parts, drawn_fields())))
    assert len(said) == bool(told)
    assert not told or (told in said[0] and "evaluate.calibrate=true" in said[0])


def test_shares_of_a_goal_count_its_own_labels():
    """40 of 400 clicks are bought in one part, 4 of 20 in the other: two standard errors."""
    labels = {"train": (40, 400), "validation": (4, 20), "test": (40, 400)}
    parts = {}
    for name, (bought, known) in labels.items():
        label = np.full((2000, 2), np.nan, np.float32)
        label[:, 0] = np.arange(2000) % 2
        label[:known, 1] = np.arange(known) < bought
        parts[name] = mock.Mock(rows=2000, device="cpu", weight=lambda _: None)
        parts[name].label = lambda rows, label=label: torch.from_numpy(label)[rows]
    dataset = mock.Mock(parts=lambda: parts, goals=["click", "buy"])
    assert list(_moved_shares(dataset, True)) == []
    labels = torch.full((2000, 2), torch.nan)
    labels[:, 0], labels[:400, 1] = torch.arange(2000) % 2, (torch.arange(400) < 120).float()
    parts["validation"].label = lambda rows: labels[rows]
    (said,) = _moved_shares(dataset, False)
    assert "0.1 of the training rows but 0.3 of the validation rows have labels of 'buy'" in said
    assert "calibrate" not in said


@pytest.mark.parametrize("multi", [0, 1])
@pytest.mark.parametrize("train, validation, test, told", [
    (0.0, 0.6, 0.0, "60%: this share of the validation ids is not in the training part; their"),
    (0.0, 1.0, 0.0, "100%: this share of the validation ids is not in the training part; leave it"),
    (0.1, 0.7, 0.0, "60%: this share of the validation ids is not in the training part; their"),
    (0.35, 0.7, 0.0, None),
    (0.0, 0.4, 0.9, None),
])  # fmt: skip
def test_unseen_ids_are_told_by_column(tmp_path, train, validation, test, told, multi):
    parts, field = {}, "M1" if multi else "C3"
    shares = {"train": train, "validation": validation, "test": test}
    for seed, (name, share) in enumerate(shares.items()):
        parts[name] = arrays = drawn_rows(400, multi=multi, vocabulary=20, seed=seed)
        arrays["ids"] = arrays["ids"] // 2 * 2
        rows = int(share * 400)
        if multi:
            # A row with the id twice is one row.
            values = np.zeros((400, 2), np.int32)
            values[:rows] = 1
            arrays |= {"offsets_0": np.arange(0, 801, 2), "values_0": values.ravel()}
        else:
            arrays["ids"][:rows, 2] = 1
    dataset = open_prepared(
        write_prepared(tmp_path, parts, drawn_fields(multi=multi, vocabulary=20))
    )
    said = on_data(replace(dataset, unseen_rows={"C1": 1, field: 1}))
    assert len(said) == bool(told)
    assert not told or (f"{field} {told}" in said[0] and "C1" not in said[0])


@pytest.mark.parametrize("field, told", [
    ("C3", "C3 1.000 (+- 0.00"), ("M1", "M1 (") , ("few", "C3 ("), ("random", None),
])  # fmt: skip
def test_a_run_tells_columns_that_leak_the_label(tmp_path, field, told):
    """By an id that is the label, by a list that only clicks have, and by an id of few clicks."""
    parts = {}
    for seed, name in enumerate(("train", "validation", "test")):
        parts[name] = arrays = drawn_rows(2000, multi=1, vocabulary=5, seed=seed)
        clicks = arrays["label"]
        if field == "M1":
            kept = np.arange(2000) % 20 == 0
            lengths = clicks * kept
            values = np.full(lengths.sum(), 3, np.int32)
            offsets = np.concatenate([[0], lengths.cumsum(dtype=np.int64)])
            arrays |= {"offsets_0": offsets.astype(np.int64), "values_0": values}
        elif field != "random":
            arrays["ids"][:, 2] = clicks * (np.arange(2000) % 20 == 0 if field == "few" else 1)
    folder = write_prepared(tmp_path, parts, drawn_fields(multi=1, vocabulary=5))
    dataset = open_prepared(folder)
    said = [text for text in on_data(dataset) if "after the click" in text]
    assert not any("after the click" in text for text in on_data(replace(dataset, period=2)))
    assert len(said) == bool(told)
    assert not told or said[0].startswith(told)


def test_an_auc_near_chance():
    assert on_first_epoch("validation", 0.55, 1) == on_first_epoch("test", None, 1) == []
    (said,) = on_first_epoch("validation", 0.5499, 2)
    assert "the validation AUC is 0.5499 after epoch 2" in said


def test_a_last_epoch_that_still_gains():
    config = configuration({"train": {"epochs": 3}, "evaluate": {"metric": "auc"}})

    def said(*aucs):
        parts = [("validation", auc) for auc in aucs] + [("test", 0.9)]
        of_parts = [
            {"kind": "evaluation", "part": part, "auc": auc, "logloss": 0.5} for part, auc in parts
        ]
        return on_last_epoch(config, mock.Mock(lines=lambda: [{"kind": "train"}, *of_parts]))

    assert said() == said(0.7) == said(None, 0.7) == said(0.7, None) == []
    assert said(0.7, 0.71, 0.705) == said(0.7, 0.7009) == []
    (found,) = said(0.69, 0.7, 0.7123)
    assert "improved the best validation AUC from 0.7000 to 0.7123" in found
    assert "train.epochs=6" in found


def test_memory_that_rows_are_read_into_again_and_again():
    assert on_memory(4e9, 4e9) == []
    (said,) = on_memory(4e9, 1.76e9)
    assert "4 GB of rows are to stay in memory, but 1.8 GB are left" in said
    assert "data.memory_gb=1.7 or less" in said
    assert "data.memory_gb=0.1 or less" in on_memory(4e9, 0.0)[0]


@pytest.mark.slow
@pytest.mark.parametrize("free", [0, 1 << 40])
def test_a_run_looks_at_the_memory_once_it_has_settled(tmp_path, monkeypatch, free):
    monkeypatch.setattr("stampede.engine.training.trainer._STEPS_UNTIL_SETTLED", 2)
    monkeypatch.setattr("stampede.engine.training.trainer.free_memory", lambda: free)
    run = train_on_movies(prepare_movies(tmp_path / "log"))
    said = [one["step"] for one in lines(run) if "data.memory_gb" in one.get("text", "")]
    assert said == [2] * (free == 0)


@pytest.mark.wide
def test_a_run_prints_logs_and_summarizes_it(tmp_path, capsys):
    untrained = ["optim.embedding.lr=0", "optim.dense.lr=0", "train.epochs=2"]
    run_small(tmp_path, [COMPARED, "evaluate.compare_with_trees=false", *untrained])
    printed = " ".join(capsys.readouterr().out.split())
    summary = summary_of(tmp_path / "small")
    said = summary["advice"]
    for text in ("only 8 steps of batch 256", "after epoch 1, hardly above chance",
                 "below that of logistic regression"):  # fmt: skip
        assert [text in sentence for sentence in said].count(True) == 1
    assert [f"advice: {text}" in printed for text in said] == [True] * 3
    logged = [(line["step"], line["text"]) for line in lines(tmp_path / "small")
              if line["kind"] == "advice"]  # fmt: skip
    assert logged == list(zip([0, 8, 16], said, strict=True))
    regression = summary["logistic_regression"]
    assert regression["validation_auc"] > 0.55 and regression["seconds"] > 0
    assert f"test AUC of LR {regression['test_auc']:.4f}, logloss" in printed
    write_report(open_runs([tmp_path / "small"]), tmp_path / "report")
    assert "below that of logistic regression" in (tmp_path / "report/report.html").read_text()
