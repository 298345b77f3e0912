"""Tables of made-up outcomes."""

import math

import pytest

from stampede.engine.plots import to_png
from stampede.engine.sweep import results as module
from stampede.engine.sweep.results import Outcome, results, to_csv, to_markdown
from stampede.engine.sweep.spec import load_sweep
from support.sweeping import write_sweep

TEXT = """
grid: {model.name: [deepfm, dcn], train.batch_size: [256, 512]}
seeds: [1, 2, 3]
published: {CowClip: {source: somewhere, auc: {deepfm / 512: 0.81}}}
"""


def outcomes_of(sweep, selected_on="test"):
    """AUC 0.7 + point/100 + seed/1000; the last trial failed."""
    found = []
    for number, trial in enumerate(sweep.trials(sweep.points)):
        auc = 0.7 + number // 3 / 100 + trial.seed / 1000
        metrics = {"auc": auc, "logloss": 0.5}
        summary = {
            **metrics,
            "validation": {"auc": auc + 0.1, "logloss": 0.4},
            "last": {"epoch": 9, "test": {"auc": auc - 0.1, "logloss": 0.9}},
            "train_seconds": 1.0,
            "rows": {"train": 5700, "test": 200},
            "selected_on": selected_on,
        }
        if selected_on == "test":
            del summary["validation"]
        found.append(Outcome(trial, summary))
    found[-1] = Outcome(found[-1].trial, message="out of memory | " + "x " * 99)
    return found


def test_markdown_says_what_selected_and_what_others_published(tmp_path):
    sweep = load_sweep(write_sweep(tmp_path, TEXT))
    text = to_markdown(sweep, results(sweep, outcomes_of(sweep)))
    lines = text.splitlines()
    assert "chosen on the test part itself (evaluate.select_on=test): optimistic" in text.replace(
        "\n", " "
    )
    (row,) = [line for line in lines if line.startswith("| deepfm") and "512" in line]
    assert "0.7120 ± 0.0006" in row and row.rstrip(" |").endswith("0.8100")
    (failed,) = [line for line in lines if line.startswith("| dcn") and "512" in line]
    assert "2, 1 failed" in failed and "0.7315 ± 0.0005" in failed
    assert "| test AUC | test logloss | last test AUC | last test logloss |" in text
    assert "Published AUC, CowClip: somewhere." in text
    assert "Data: synthetic; 5,700 training rows, 200 test rows; selected on the test part." in text
    assert "Failed (`--retry-failed` runs them again):" in text
    assert "- `dcn-512-seed3`: out of memory" in text
    assert max(len(line) for line in lines if not line.startswith("|")) <= 100


def test_csv_holds_numbers_in_full_of_all_metrics(tmp_path):
    sweep = load_sweep(write_sweep(tmp_path, TEXT))
    head, first, *_ = to_csv(sweep, results(sweep, outcomes_of(sweep))).splitlines()
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
    sweep = load_sweep(write_sweep(tmp_path, TEXT + shown))
    found = results(sweep, outcomes_of(sweep, "validation"))
    head = to_csv(sweep, found).splitlines()[0].split(",")
    # All metrics that were computed, those that the Markdown shows first.
    assert [name for name in head if name.endswith("_mean")] == [
        "validation_logloss_mean", "logloss_mean", "validation_auc_mean", "auc_mean",
        "last_logloss_mean", "train_seconds_mean", "clipped_share_mean", "last_auc_mean",
    ]  # fmt: skip
    text = to_markdown(sweep, found)
    heads = "| validation logloss | test logloss | last test logloss | seconds | clipped_share |"
    assert heads in " ".join(text.split())
    assert "0.4000 ± 0.0000" in text and "0.9000 ± 0.0000" in text
    # No trial has a clipped share.
    assert "best on the validation part" in text and "None" not in text


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
        name, rate = trial.point.labels.values()
        if trial.seed > 1 and rate != "high":
            continue
        auc = 0.6 + 0.1 * (rate == "high")
        summary = {
            "auc": 1.3 - auc,
            "validation": {"auc": auc},
            "last": {"test": {"auc": 0.5}},
            "train_seconds": 1.0,
            "rows": {"train": 5700, "test": 200},
            "parameters": {"tables": 1_000_000, "dense": 234 + (name == "dcn")},
            "selected_on": "validation",
        }
        message = "the loss is nan" if rate == "wild" else ""
        found.append(Outcome(trial, {} if message else summary, message))
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
    heads = "| parameters | seeds | published AUC, here | published AUC, there |"
    assert heads in " ".join(text.split())
    assert [cell.strip() for cell in dcn.split("|")[-3:-1]] == ["0.8100", ""]
    assert "- `deepfm-wild-seed1`: the loss is nan" in text
    row = to_csv(sweep, found).splitlines()[2].split(",")
    assert row[:2] == ["dcn", "high"] and row[-2:] == ["0.81", ""] and "1000235.0" in row
    (_, axes) = drawn(sweep, monkeypatch, tmp_path, found)["auc.png"].axes
    assert axes.get_xlabel() == "model.name"
    # One line: the rate is no axis of the table.
    assert len(axes.containers) == 1 and axes.get_legend() is None


def drawn(sweep, monkeypatch, folder, found=None):
    """The pictures, drawn to the end, by name of the file."""
    figures = []
    monkeypatch.setattr(module, "to_png", lambda one: figures.append(one) or to_png(one))
    found = found or results(sweep, outcomes_of(sweep, "validation"))
    files = module.draw(sweep, found, folder)
    return {file.name: figure for file, figure in zip(files, figures, strict=True)}


def test_names_with_dollar_signs_are_drawn_as_they_are(tmp_path, monkeypatch):
    text = """
grid:
  "net_{$": {"$a_{$": [model.name=deepfm], b: [model.name=dcn]}
  "size_{$": {"$1_{$": [train.batch_size=256], "2": [train.batch_size=512]}
"""
    sweep = load_sweep(write_sweep(tmp_path, text))
    figure = drawn(sweep, monkeypatch, tmp_path)["auc.png"]
    validation, axes = figure.axes
    assert [validation.get_ylabel(), axes.get_ylabel()] == ["validation AUC", "test AUC"]
    assert validation.containers[0][0].get_ydata() == pytest.approx([0.801, 0.801])
    assert axes.containers[0][0].get_ydata() == pytest.approx([0.701, 0.701])
    # The axis that the lines differ in.
    assert axes.get_legend().get_title().get_text() == "net_{$"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["$a_{$", "b"]
    assert axes.get_xlabel() == "size_{$" and axes.get_xticklabels()[0].get_text() == "$1_{$"


def test_points_that_are_excluded_are_neither_run_nor_shown(tmp_path, monkeypatch):
    sweep = load_sweep(write_sweep(tmp_path, TEXT + "exclude: [deepfm / 256]\n"))
    assert sweep.count == 9 and len(sweep.trials(sweep.points)) == 9
    found = results(sweep, outcomes_of(sweep, "validation"))
    assert [one.point.title for one in found] == ["deepfm / 512", "dcn / 256", "dcn / 512"]
    _, axes = drawn(sweep, monkeypatch, tmp_path, found)["auc.png"].axes
    # The axis is in the order of the file, also where its first point is missing.
    assert [text.get_text() for text in axes.get_xticklabels()] == ["256", "512"]
    assert [len(line[0].get_xdata()) for line in axes.containers] == [1, 2]


@pytest.mark.parametrize("published", [True, False])
def test_the_small_form_shows_what_others_published_if_asked(tmp_path, published):
    small = f"small: {{seeds: [1, 2], published: {str(published).lower()}}}\n"
    sweep = load_sweep(write_sweep(tmp_path, TEXT + small), small=True)
    assert ("0.8100" in to_markdown(sweep, results(sweep, outcomes_of(sweep)))) == published
