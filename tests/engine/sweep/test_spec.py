"""Sweep files: those that are shipped, and wrong ones."""

import re

import pytest

from stampede.engine.sweep.__main__ import main
from stampede.engine.sweep.spec import load_sweep
from stampede.settings import SettingsError
from support.networks import OURS
from support.paths import ROOT
from support.sweeping import write_sweep

SHIPPED = sorted((ROOT / "configs/sweeps").glob("*.yaml"))
GRID = "grid: {train.epochs: [1, 2]}\n"
TUNED = "grid: {train.epochs: [1, 2], model.name: [lr, fm]}\ntune: train.epochs\n"
STUDY = "study: {parameters: {train.epochs: {low: 1, high: 3}}"

# The file's text besides `config`, and words of the sentence it gets.
BAD = [
    ("", ["write either a grid or a study"]),
    (GRID + STUDY + "}", ["either a grid or a study"]),
    ("grid: {train.epochs: 3}", ["grid: train.epochs: found 3", "a list of values"]),
    ("grid: {batch: [1, 2]}", ["grid: batch", "such as train.batch_size"]),
    ("grid: {train.epoch: [1]}", ["tiny.yaml: 1: ", "train.epoch: unknown key", "'epochs'"]),
    ("grid: {train.epochs: [1, 0]}", ["tiny.yaml: 0: ", "greater than or equal to 1"]),
    ("grid: {run.seed: [1, 2]}", ["run.seed", "seeds in the file"]),
    ("grid: {size: {a b: [train.epochs=1], a-b: [train.epochs=2]}}", ["2 points", "a-b-seed1"]),
    (TUNED.replace("tune: train.", "tune: "), ["tune: found 'epochs'", "write an axis"]),
    (
        TUNED + "report: {x: train.epochs}",
        ["report.x: 'train.epochs' is not an axis of the grid that is not tuned"],
    ),
    (
        TUNED + "published: {a: {source: a, auc: {1 / fm: 0.8}}}",
        ["published.a.auc", "'1 / fm' is not a point", "such as 'lr'"],
    ),
    (GRID + "exclude: ['3']", ["exclude: '3' is not a point of the grid", "such as '1'"]),
    (GRID + "exclude: ['1', '2']", ["exclude: no point of the grid is left", "name fewer"]),
    (STUDY + "}\nexclude: [a]", ["exclude", "points of a grid"]),
    (GRID + "small: {grid: {batch: {a: []}}}", ["small.grid.batch", "train.epochs"]),
    ("study: {parameters: {a.b: {low: 1}}}", ["study.parameters.a.b", "low and high, or choices"]),
    ("study: {parameters: {a.b: {low: 2, high: 1}}}", ["low is 2 and high 1"]),
    ("study: {parameters: {a.b: {low: 0, high: 1, log: true}}}", ["a low above 0"]),
    (STUDY.replace("epochs", "epoch") + "}", ["train.epoch=1: ", "did you mean 'epochs'?"]),
    (STUDY + ", metric: gauc}", ["study.metric is 'gauc'", "not computed", "evaluate.group_by"]),
    (
        STUDY + ", metric: pr_auc}\noverrides: ['evaluate.metrics=[]']",
        ["study.metric is 'pr_auc'", "evaluate.metrics"],
    ),
    (
        "grid: {clip: {none: [optim.embedding.clip=null]}, optim.embedding.clip.bound: [1e-3]}",
        ["both set optim.embedding.clip.bound"],
    ),
    (
        "study: {parameters: {a.b: {choices: [1]}}, metric: logloss}",
        ["direction is 'maximize'", "write direction: minimize"],
    ),
]


@pytest.mark.parametrize("text, words", BAD)
def test_a_wrong_file_gets_a_sentence(text, words, tmp_path):
    with pytest.raises(SettingsError) as raised:
        load_sweep(write_sweep(tmp_path, text))
    for word in words:
        assert word in str(raised.value)


def test_values_of_a_study_that_need_each_other_are_not_refused(tmp_path):
    text = """study:
  parameters:
    train.epochs: {low: 1, high: 3}
    optim.dense.schedule.warmup: {choices: [0, 2]}
overrides: [optim.dense.schedule.decay=cosine]
"""
    assert load_sweep(write_sweep(tmp_path, text)).study.trials == 20


def shipped(path, small):
    """A shipped sweep; in full it is for a log of the user's, unless it draws its rows."""
    draws_rows = path.stem.startswith("synthetic")
    return load_sweep(path, [] if small or draws_rows else ["data.path=train.txt"], small)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize("small", [False, True])
def test_shipped_sweeps_load_in_both_forms(path, small):
    sweep = shipped(path, small)
    assert path.read_text().startswith("# ")
    assert sweep.folder.name == path.stem + ("-small" if small else "")
    trials = sweep.trials(sweep.points)
    assert sweep.study or len(trials) >= 8
    for trial in trials:
        config = sweep.config_of(trial)
        assert config.run.name == trial.name
        assert config.run.seed == trial.seed
        # Nothing is chosen on the test part, but for the authors' code, which does it.
        on_test = path.stem == "authors_code"
        assert config.evaluate.select_on == ("test" if on_test else "validation")
        if config.data.kind != "synthetic":
            assert ("shared/data" in config.data.path) == small


def test_the_manual_counts_the_trials():
    text = (ROOT / "docs/experiments.md").read_text(encoding="utf-8")
    shown = {}
    for names, counts in re.findall(r"^\| ((?:`\w+\.yaml`(?:, )?)+) \|.*\| (.*) \|$", text, re.M):
        full, small = counts.split("; ")
        for name, count in zip(
            re.findall(r"`(\w+)\.yaml`", names), small.split(" and "), strict=True
        ):
            shown[name] = (int(full), int(count))
    counted = {}
    for path in SHIPPED:
        forms = [shipped(path, small) for small in (False, True)]
        counted[path.stem] = tuple(one.count for one in forms)
    assert shown == counted


@pytest.mark.parametrize("log", ["criteo", "avazu"])
def test_leaderboards_have_all_networks(log):
    sweep = load_sweep(ROOT / f"configs/sweeps/leaderboard_{log}.yaml", small=True)
    configs = [sweep.config_of(point.trial(1)) for point in sweep.points]
    assert {config.model.name for config in configs} == set(OURS)


def test_mistakes_end_with_status_2_before_anything_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    grid = str(write_sweep(tmp_path, GRID))
    (tmp_path / "job.yaml").write_text("data: {kind: criteo_kaggle}")
    for arguments, words in (
        (["absent.yaml"], "absent.yaml: no such file"),
        ([grid], "data.path is not given"),
        ([grid, "data.path=absent.tsv"], "absent.tsv"),
        ([grid, "train.epochs=3"], "the sweep varies train.epochs"),
        ([grid, "--small"], "no section `small`"),
        ([grid, "--processes", "0"], "--processes: found 0"),
    ):
        assert main(arguments) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
