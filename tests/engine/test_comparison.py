"""Other models beside a run: which, when, and what is said of them."""

from types import SimpleNamespace
from unittest import mock

import pytest

from stampede.engine import comparison
from stampede.engine.comparison import on_baseline
from stampede.settings import SettingsError
from support.jobs import run_small
from support.movie_runs import summary_of

# As it is by itself.
COMPARED = "evaluate.compare_with_lr=auto"


def test_a_run_below_another_model():
    def below(ours, other, epoch=3):
        progress = SimpleNamespace(selected={"validation": {"auc": ours}}, epoch=epoch)
        return on_baseline("validation", progress, {"validation_auc": other}, "LightGBM")

    assert below(0.7, 0.7019) == below(None, 0.7) == below(0.7, None) == below(0.8, 0.7) == []
    (said,) = below(0.7, 0.7021)
    assert "validation AUC 0.7000 is below that of LightGBM, 0.7021: try other rates" in said
    assert "try more epochs (train.epochs=6), other rates" in below(0.7, 0.7021, epoch=2)[0]


@pytest.mark.slow
def test_both_are_automatic_up_to_a_million_rows_and_are_kept(tmp_path, monkeypatch, capsys):
    many_steps = "train.batch_size=32"
    monkeypatch.setattr(comparison, "_MOST_TRAINING_ROWS", 1899)
    run_small(tmp_path, [COMPARED, many_steps, "train.epochs=2"])
    good = summary_of(tmp_path / "small")
    assert good["logistic_regression"] is good["boosted_trees"] is None and good["advice"] == []
    monkeypatch.setattr(comparison, "_MOST_TRAINING_ROWS", 1900)
    run_small(tmp_path, [COMPARED, "run.overwrite=true"])
    before = summary_of(tmp_path / "small")
    trees = before["boosted_trees"]
    assert before["logistic_regression"]["test_auc"] > 0.5 and trees["test_auc"] > 0.5
    printed = " ".join(capsys.readouterr().out.split())
    said = f"of LightGBM {trees['test_auc']:.4f}, logloss {trees['test_logloss']:.4f}: "
    assert f"{said}{trees['trees']} trees of {trees['leaves']} leaves on the same" in printed
    for key, baseline in comparison.BASELINES.items():
        monkeypatch.setitem(comparison.BASELINES, key, baseline._replace(fit=None))
    run_small(tmp_path, [COMPARED, "checkpoint.resume=auto", "train.epochs=2"])
    after = summary_of(tmp_path / "small")
    assert after["steps"] == 16
    assert all(after[key] == before[key] for key in ("logistic_regression", "boosted_trees"))
    assert after["advice"][:2] == before["advice"][:2]


LR, TREES = "logistic_regression", "boosted_trees"


@pytest.mark.parametrize("settings, rows, expected", [
    ({}, 10, [LR, TREES]),
    ({}, 2_000_000, []),
    ({"compare_with_lr": False}, 10, []),
    ({"compare_with_lr": True}, 2_000_000, [LR]),
    ({"compare_with_trees": False}, 10, [LR]),
    ({"compare_with_lr": False, "compare_with_trees": True}, 2_000_000, [TREES]),
])  # fmt: skip
def test_what_is_asked_for(settings, rows, expected):
    given = {"compare_with_lr": "auto", "compare_with_trees": "auto", "select_on": "validation"}
    config = SimpleNamespace(evaluate=SimpleNamespace(**given | settings))
    dataset = SimpleNamespace(tables={}, train=SimpleNamespace(rows=rows), goals=())
    progress, folder = SimpleNamespace(selected={}, epoch=1, step=1), mock.Mock()
    with (
        mock.patch.object(comparison, "fit_baseline") as fit,
        mock.patch.object(comparison, "tell"),
    ):
        comparison.compare(config, dataset, progress, folder, None, {}, same_data=False)
    fitted = [call.args[0] for call in fit.call_args_list]
    assert fitted == expected


def test_a_comparison_that_cannot_be_made(monkeypatch):
    config = SimpleNamespace(evaluate=SimpleNamespace(compare_with_trees=True))
    comparison.check_installed(config)
    monkeypatch.setattr(comparison, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match="`pip install lightgbm`, or leave the key out"):
        comparison.check_installed(config)
    config.evaluate.compare_with_trees = "auto"
    comparison.check_installed(config)
