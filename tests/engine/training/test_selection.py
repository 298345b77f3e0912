"""What evaluations decide: the best epoch, early stops, reduced rates."""

import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stampede.engine.training.evaluate as made_by
from stampede.engine.config.optim import PlateauSection
from stampede.engine.metrics import PARTS
from stampede.engine.training.plateau import Plateau
from stampede.settings import SettingsError
from support.jobs import lines, run_small, without_times


def summary_of(folder):
    return json.loads((folder / "small/summary.json").read_text())


def evaluations(folder, part):
    return [line for line in lines(folder / "small") if line.get("part") == part]


@pytest.fixture
def scripted(monkeypatch):
    """Let the validation part have given AUCs, or other metrics, one evaluation after another."""
    real = made_by.evaluate

    def script(*aucs):
        values = iter(aucs)

        def evaluate(model, batches, *others):
            found = real(model, batches, *others)
            # The small job's validation part has 100 rows, its test part 300.
            if found["samples"] != 100:
                return found
            value = next(values)
            return found | (value if isinstance(value, dict) else {"auc": value})

        monkeypatch.setattr(made_by, "evaluate", evaluate)

    return script


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 30), max_size=40),
    st.sampled_from([0.1, 0.5]),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.02]),
)
def test_a_plateau_matches_torchs(scores, factor, patience, threshold):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, "max", factor, patience, threshold, threshold_mode="abs", min_lr=0.03, eps=0
    )
    ours = Plateau()
    section = PlateauSection(factor=factor, patience=patience, threshold=threshold, least=0.03)
    for score in scores:
        theirs.step(score / 30)
        ours = ours.after(score / 30, section)
        assert ours.fraction == pytest.approx(optimizer.param_groups[0]["lr"])


@pytest.mark.slow
def test_training_stops_when_epochs_are_no_better(tmp_path, scripted, capsys):
    scripted(0.7, 0.69, 0.71, 0.71, 0.7)
    run_small(tmp_path, ["train.epochs=10", "evaluate.patience=2", "checkpoint.keep=1"])
    summary = summary_of(tmp_path)
    assert (summary["epochs"], summary["best_epoch"], summary["stopped_early"]) == (5, 3, True)
    assert summary["best_auc"] == evaluations(tmp_path, "test")[2]["auc"]
    kept = {path.name for path in (tmp_path / "small/checkpoints").iterdir()}
    assert kept == {"epoch_0003", "epoch_0005"}
    assert "no better AUC on the validation part since epoch 3" in capsys.readouterr().out


@pytest.mark.wide
def test_a_run_that_stopped_early_stays_stopped_until_it_may_wait_longer(tmp_path, scripted):
    scripted(0.7, 0.6, 0.6, 0.71)
    overrides = ["train.epochs=4", "checkpoint.resume=auto"]
    run_small(tmp_path, [*overrides, "evaluate.patience=1"])
    before = without_times(tmp_path / "small")
    run_small(tmp_path, [*overrides, "evaluate.patience=1"])
    assert without_times(tmp_path / "small") == before
    assert summary_of(tmp_path)["stopped_early"]
    run_small(tmp_path, [*overrides, "evaluate.patience=3"])
    summary = summary_of(tmp_path)
    assert (summary["epochs"], summary["best_epoch"], summary["stopped_early"]) == (4, 4, False)


@pytest.mark.slow
def test_results_are_those_of_the_selected_epoch_beside_the_last_one(tmp_path, scripted, capsys):
    scripted(0.6, 0.71, 0.7)
    overrides = ["train.epochs=3", "optim.embedding.lr=0.05", "evaluate.group_by=C6"]
    run_small(tmp_path, overrides)
    summary = summary_of(tmp_path)
    assert summary["best_epoch"] == 2 and summary["last"]["epoch"] == 3
    for part, shown in (("validation", summary["validation"]), ("test", summary)):
        _, selected, last = evaluations(tmp_path, part)
        names = [name for name in selected if name in summary["last"][part]]
        assert {"auc", "logloss", "pr_auc", "calibration_buckets", "gauc"} < set(names)
        assert selected["logloss"] != last["logloss"]
        assert [shown[name] for name in names] == [selected[name] for name in names]
        assert summary["last"][part] == {name: last[name] for name in names}
    printed = capsys.readouterr().out
    assert "epoch 2: best AUC on the validation part; epoch 3: the last one\n" in printed
    cells = [summary["validation"], summary, *map(summary["last"].get, PARTS)]
    cells = [f"{metrics['logloss']:.4f}" for metrics in cells]
    assert re.search(r"^  logloss +" + " +".join(cells) + "$", printed, flags=re.M)
    # The same from the newest checkpoint.
    run_small(tmp_path, [*overrides, "checkpoint.resume=auto"])
    assert summary_of(tmp_path)["validation"] == summary["validation"]


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("metric", "epoch", "said"),
    [("auc", 3, "AUC"), ("logloss", 1, "logloss"), ("both", 2, "AUC minus logloss")],
)
def test_the_metric_chooses_the_epoch(tmp_path, scripted, capsys, metric, epoch, said):
    found = [(0.70, 0.40), (0.75, 0.42), (0.76, 0.47), (0.74, 0.48), (0.79, 0.49)]
    scripted(*({"auc": auc, "logloss": logloss} for auc, logloss in found))
    run_small(tmp_path, ["train.epochs=4", f"evaluate.metric={metric}"])
    assert summary_of(tmp_path)["best_epoch"] == epoch
    assert f"epoch {epoch}: best {said} on the validation part" in capsys.readouterr().out


@pytest.mark.slow
def test_evaluation_every_other_epoch_and_after_the_last(tmp_path):
    run_small(tmp_path, ["train.epochs=5", "evaluate.every_epochs=2", "checkpoint.keep=9"])
    assert [line["step"] for line in evaluations(tmp_path, "test")] == [16, 32, 40]
    # What was not evaluated may have diverged, and is not saved.
    kept = {path.name for path in (tmp_path / "small/checkpoints").iterdir()}
    assert kept == {"epoch_0002", "epoch_0004", "epoch_0005"}
    summary = summary_of(tmp_path)
    assert summary["best_epoch"] in (2, 4, 5) and summary["last"]["epoch"] == 5


@pytest.mark.slow
def test_rates_fall_on_a_plateau_by_factors_of_their_own(tmp_path, scripted, capsys):
    scripted(0.6, 0.7, 0.705, 0.7, 0.72, 0.72, 0.72, 0.72)
    run_small(tmp_path, [
        "train.epochs=4", "evaluate.every=4", "train.log_every=4",
        "optim.dense.schedule.warmup=0",
        "optim.dense.plateau={factor: 0.5, patience: 1, threshold: 0.01}",
        "optim.embedding.plateau={factor: 0.1, patience: 0, threshold: 0.01, least: 0.05}",
    ])  # fmt: skip
    logged = [line for line in lines(tmp_path / "small") if line["kind"] == "train"]
    expected = 1e-2 * np.array([1, 1, 1, 0.1, 0.05, 0.05, 0.05, 0.05])
    assert [line["embedding_lr"] for line in logged] == pytest.approx(expected)
    # A line after each evaluation, but for the last; a quarter of the base batch halves the rate.
    expected = 5e-4 * np.array([1, 1, 1, 1, 0.5, 0.5, 0.5, 0.25])
    assert [line["dense_lr"] for line in logged] == pytest.approx(expected)
    assert "the tables continue with 0.05 of their scheduled rate" in capsys.readouterr().out


@pytest.mark.slow
def test_metrics_reach_the_files(tmp_path):
    run_small(tmp_path, ["evaluate.group_by=C6"])
    names = {"pr_auc", "normalized_entropy", "calibration", "calibration_buckets", "gauc",
             "gauc_groups", "gauc_left_out", "gauc_unknown_samples"}  # fmt: skip
    summary = summary_of(tmp_path)
    assert names < evaluations(tmp_path, "validation")[-1].keys()
    last = evaluations(tmp_path, "test")[-1]
    assert all(summary[name] == last[name] for name in names)
    assert 0 < summary["gauc_groups"] + summary["gauc_left_out"] <= 24
    # Each row of the table is one synthetic id.
    assert summary["gauc_unknown_samples"] == 0
    run_small(tmp_path, ["run.overwrite=true", "evaluate.metrics=[calibration]"])
    assert names & summary_of(tmp_path).keys() == {"calibration"}
    with pytest.raises(SettingsError, match=r"evaluate.group_by: 'user' is not an id.*C1, C2"):
        run_small(tmp_path, ["run.overwrite=true", "evaluate.group_by=user"])
