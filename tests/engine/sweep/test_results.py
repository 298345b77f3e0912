"""Tables of made-up outcomes."""

import math
import re

import pytest

from stampede.engine.plots import to_png
from stampede.engine.sweep import results as module
from stampede.engine.sweep.results import Outcome, results, to_csv, to_markdown
from stampede.engine.sweep.spec import Point, load_sweep
from support.sweeping import write_sweep

TEXT = """
grid: {model.name: [deepfm, dcn], train.batch_size: [256, 512]}
seeds: [1, 2, 3]
published: {CowClip: {source: somewhere, auc: {deepfm / 512: 0.81}}}
"""


def summary_of(auc, validation_auc=None, selected_on="validation"):
    """Of a run whose last epoch is worse than the selected one."""
    validation = {"auc": validation_auc, "logloss": 0.4}
    return {
        "auc": auc,
        "logloss": 0.5,
        **({"validation": validation} if validation_auc else {}),
        "last": {"epoch": 9, "test": {"auc": auc - 0.1, "logloss": 0.9}},
        "train_seconds": 1.0,
        "rows": {"train": 5700, "test": 200},
        "parameters": {"tables": 1_000_000, "dense": 235},
        "selected_on": selected_on,
    }


def outcomes_of(sweep, selected_on="test"):
    """AUC 0.7 + point/100 + seed/1000; the last trial failed."""
    found = []
    for number, trial in enumerate(sweep.trials(sweep.points)):
        auc = 0.7 + number // 3 / 100 + trial.seed / 1000
        on_validation = auc + 0.1 if selected_on == "validation" else None
        found.append(Outcome(trial, summary_of(auc, on_validation, selected_on)))
    found[-1] = Outcome(found[-1].trial, message="out of memory")
    return found


def tables_of(folder, text=TEXT, selected_on="test", small=False):
    """The Markdown in one line, and the lines of the CSV."""
    sweep = load_sweep(write_sweep(folder, text), small=small)
    found = results(sweep, outcomes_of(sweep, selected_on))
    return " ".join(to_markdown(sweep, found).split()), to_csv(sweep, found).splitlines()


def test_tables_say_what_selected_and_what_others_published(tmp_path):
    text, (head, first, *_) = tables_of(tmp_path)
    assert "chosen on the test part itself (evaluate.select_on=test): optimistic" in text
    assert "| test AUC | test logloss | last test AUC | last test logloss |" in text
    assert re.search(r"\| deepfm +\| +512 \| 0.7120 ± 0.0006 .* 3 \| 0.8100 \| \| dcn", text)
    assert re.search(r"\| dcn +\| +512 \| 0.7315 ± 0.0005 .* 2, 1 failed \|", text)
    assert "Published AUC, CowClip: somewhere." in text
    assert "Data: synthetic; 5,700 training rows, 200 test rows; selected on the test part." in text
    assert "Failed (`--retry-failed` runs them again): - `dcn-512-seed3`: out of memory" in text
    # Numbers in full, of all metrics.
    assert head == (
        "model.name,train.batch_size,auc_mean,auc_stderr,logloss_mean,logloss_stderr,"
        "last_auc_mean,last_auc_stderr,last_logloss_mean,last_logloss_stderr,"
        "seeds,failed,selected_on,auc_published_CowClip"
    )
    cells = first.split(",")
    figures = [float(cells[2]), float(cells[3]), float(cells[6])]
    assert figures == pytest.approx([0.702, 0.001 / math.sqrt(3), 0.602])
    assert cells[-4:] == ["3", "0", "test", ""]


def test_validation_stands_beside_test_and_then_the_last_epoch(tmp_path):
    shown = "report: {metrics: [logloss, train_seconds, clipped_share]}"
    text, (head, *_) = tables_of(tmp_path, TEXT + shown, "validation")
    # All metrics that were computed, those that the Markdown shows first.
    assert [name for name in head.split(",") if name.endswith("_mean")] == [
        "validation_logloss_mean", "logloss_mean", "validation_auc_mean", "auc_mean",
        "last_logloss_mean", "train_seconds_mean", "clipped_share_mean", "last_auc_mean",
    ]  # fmt: skip
    heads = "| validation logloss | test logloss | last test logloss | seconds | clipped_share |"
    assert heads in text and "best on the validation part" in text
    # No trial has a clipped share.
    assert "0.4000 ± 0.0000" in text and "0.9000 ± 0.0000" in text and "None" not in text


def test_the_small_form_shows_what_others_published_if_asked(tmp_path):
    for published in ("true", "false"):
        small = f"small: {{seeds: [1, 2], published: {published}}}\n"
        text, *_ = tables_of(tmp_path, TEXT + small, small=True)
        assert ("0.8100" in text) == (published == "true")


TUNED = """
grid:
  model.name: [deepfm, dcn]
  rate: {low: [optim.dense.lr=1e-4], high: [optim.dense.lr=1e-3], wild: [optim.dense.lr=1]}
tune: rate
seeds: [1, 2]
published: {here: {source: a, auc: {dcn: 0.81}}, there: {source: b, auc: {deepfm: 0.82}}}
report: {metrics: [auc, parameters]}
"""


def tuned_outcomes(sweep):
    """On the validation part `high` is best, on the test part `low`; `wild` fails."""
    found = []
    for trial in sweep.trials(sweep.points):
        rate = trial.point.labels["rate"]
        if rate == "wild":
            found.append(Outcome(trial, message="the loss is nan"))
        elif trial.seed == 1 or rate == "high":
            auc = 0.6 + 0.1 * (rate == "high")
            found.append(Outcome(trial, summary_of(1.3 - auc, auc)))
    return found


def test_a_tuned_axis_has_the_value_that_the_validation_part_chose(tmp_path, monkeypatch):
    sweep = load_sweep(write_sweep(tmp_path, TUNED))
    # Three rates with the first seed and one with the second, for two networks.
    assert sweep.count == 8
    found = results(sweep, tuned_outcomes(sweep))
    chosen = [(*one.point.labels.values(), len(one.outcomes)) for one in found]
    assert chosen == [("deepfm", "high", 2), ("dcn", "high", 2)]
    text = to_markdown(sweep, found)
    said = "rate: the tried value with the largest AUC on the part that chose the epoch"
    assert said in " ".join(text.split())
    (dcn,) = [line for line in text.splitlines() if line.startswith("| dcn")]
    assert "0.6000 ± 0.0000" in dcn and " 1,000,235 " in dcn
    assert [cell.strip() for cell in dcn.split("|")[-3:-1]] == ["0.8100", ""]
    assert "- `deepfm-wild-seed1`: the loss is nan" in text
    row = to_csv(sweep, found).splitlines()[2].split(",")
    assert row[:2] == ["dcn", "high"] and row[-2:] == ["0.81", ""] and "1000235.0" in row
    (_, axes) = drawn(sweep, monkeypatch, tmp_path, found).axes
    assert axes.get_xlabel() == "model.name"
    # One line: the rate is no axis of the table.
    assert len(axes.containers) == 1 and axes.get_legend() is None


def drawn(sweep, monkeypatch, folder, found=None, name="auc.png"):
    """A picture, drawn to the end."""
    figures = []
    monkeypatch.setattr(module, "to_png", lambda one: figures.append(one) or to_png(one))
    found = found or results(sweep, outcomes_of(sweep, "validation"))
    files = module.draw(sweep, found, folder)
    return figures[[file.name for file in files].index(name)]


def test_names_with_dollar_signs_are_drawn_as_they_are(tmp_path, monkeypatch):
    text = """
grid:
  "net_{$": {"$a_{$": [model.name=deepfm], b: [model.name=dcn]}
  "size_{$": {"$1_{$": [train.batch_size=256], "2": [train.batch_size=512]}
"""
    validation, axes = drawn(load_sweep(write_sweep(tmp_path, text)), monkeypatch, tmp_path).axes
    assert [validation.get_ylabel(), axes.get_ylabel()] == ["validation AUC", "test AUC"]
    assert validation.containers[0][0].get_ydata() == pytest.approx([0.801, 0.801])
    assert axes.containers[0][0].get_ydata() == pytest.approx([0.701, 0.701])
    # The axis that the lines differ in.
    assert axes.get_legend().get_title().get_text() == "net_{$"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["$a_{$", "b"]
    assert axes.get_xlabel() == "size_{$" and axes.get_xticklabels()[0].get_text() == "$1_{$"


def test_long_labels_of_an_axis_are_turned_so_that_they_do_not_overlap(tmp_path, monkeypatch):
    for labels, rotation in ((["1x", "8x"], 0), ([f"{n}x, 24 epochs" for n in range(8)], 30)):
        batches = [f"'{text}': [train.batch_size={256 * at}]" for at, text in enumerate(labels, 1)]
        sweep = load_sweep(write_sweep(tmp_path, f"grid: {{batch: {{{', '.join(batches)}}}}}"))
        for axes in drawn(sweep, monkeypatch, tmp_path).axes:
            assert {text.get_rotation() for text in axes.get_xticklabels()} == {rotation}


def test_points_that_are_excluded_are_neither_run_nor_shown(tmp_path, monkeypatch):
    sweep = load_sweep(write_sweep(tmp_path, TEXT + "exclude: [deepfm / 256]\n"))
    assert sweep.count == len(sweep.trials(sweep.points)) == 9
    found = results(sweep, outcomes_of(sweep, "validation"))
    assert [one.point.title for one in found] == ["deepfm / 512", "dcn / 256", "dcn / 512"]
    _, axes = drawn(sweep, monkeypatch, tmp_path, found).axes
    # The axis is in the order of the file, also where its first point is missing.
    assert [text.get_text() for text in axes.get_xticklabels()] == ["256", "512"]
    assert [len(line[0].get_xdata()) for line in axes.containers] == [1, 2]


def test_a_logarithmic_axis_of_a_study_shows_plain_numbers(tmp_path, monkeypatch):
    text = "study: {parameters: {optim.embedding.lr: {low: 1e-4, high: 1e-1, log: true}}}"
    sweep = load_sweep(write_sweep(tmp_path, text))
    points = [
        Point({"optim.embedding.lr": rate}, (), name=f"trial{number:04d}")
        for number, rate in enumerate(("0.0001", "0.002", "0.1"))
    ]
    outcomes = [Outcome(point.trial(1), summary_of(0.7, 0.7)) for point in points]
    found = results(sweep, outcomes)
    _, axes, *_ = drawn(sweep, monkeypatch, tmp_path, found, "study.png").axes
    ticks = [text.get_text() for text in axes.get_xticklabels(which="both")]
    assert "0.001" in ticks and not any("$" in text for text in ticks)
