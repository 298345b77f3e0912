"""Grids, tuned axes and studies of small trainings: tables, failures, kills, mistakes."""

import ast
import csv
import json

import numpy as np
import pytest

from stampede import SettingsError, TrainingStoppedError, open_run
from stampede.lab import sweep as module
from stampede.lab.sweep import load_sweep, main, run_sweep
from support.object_store import BUCKET, object_store
from support.own_networks import NUMBERS_ONLY, own_network
from support.paths import ROOT

JOB = """
preset: paper
data: {scale: 0.0005, rows: 600, test_rows: 200}
model: {hidden: [8], init_std: 1e-4}
train: {batch_size: 256, epochs: 1}
optim: {dense: {lr: 1e-3}}
evaluate: {compare_with_lr: false}
"""
GRID = """
grid:
  model.name: [lr, fm]
  rate:
    low: [optim.dense.lr=1e-4]
    too high: [optim.dense.lr=1e38, optim.dense.schedule.warmup=0]
seeds: [1, 2]
"""


def write_sweep(folder, text):
    """A sweep file beside its job."""
    (folder / "job.yaml").write_text(JOB)
    path = folder / "tiny.yaml"
    path.write_text(f"config: job.yaml\n{text}")
    return path


def swept(folder, text, *overrides, **options):
    options = {"small": False, "retry_failed": False, **options}
    return run_sweep(write_sweep(folder, text), overrides, folder / "out", **options)


def rows_of(folder):
    with (folder / "out/results.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def trained(monkeypatch):
    """Names of the trials that were trained; the number in `die_at` is killed."""
    names, train = [], module.train
    names_of = type("Trained", (), {"names": names, "die_at": None})()

    def noted(config, **values):
        names.append(values["run.name"])
        if len(names) == names_of.die_at:
            raise SystemExit("killed")
        return train(config, **values)

    monkeypatch.setattr(module, "train", noted)
    return names_of


@pytest.mark.slow
def test_a_killed_grid_goes_on_and_its_table_has_means_and_failures(tmp_path, trained):
    trained.die_at, grid = 4, GRID.replace("[lr, fm]", "[lr]")
    with pytest.raises(SystemExit):
        swept(tmp_path, grid)
    assert not (tmp_path / "out/results.csv").exists()
    trained.die_at = None
    files = swept(tmp_path, grid)
    first = ["lr-low-seed1", "lr-low-seed2", "lr-too-high-seed1", "lr-too-high-seed2"]
    assert trained.names == [*first, "lr-too-high-seed2"]
    assert {file.name for file in files} == {"results.csv", "results.md", "auc.png", "seconds.png"}
    rows = rows_of(tmp_path)
    assert [(row["model.name"], row["rate"], row["seeds"], row["failed"]) for row in rows] == [
        ("lr", "low", "2", "0"), ("lr", "too high", "0", "2"),
    ]  # fmt: skip
    aucs = [
        open_run(tmp_path / f"out/trials/lr-low-seed{seed}").metrics["test"]["auc"]
        for seed in (1, 2)
    ]
    assert float(rows[0]["test_auc_mean"]) == pytest.approx(np.mean(aucs))
    assert float(rows[0]["test_auc_stderr"]) == pytest.approx(np.std(aucs, ddof=1) / 2**0.5)
    text = (tmp_path / "out/results.md").read_text()
    assert f"{np.mean(aucs):.4f} ± " in text and "- lr / too high, seed 1: " in text
    assert "600 training rows" in text.replace("570", "600") and max(map(len, text.split("\n")))
    assert not (tmp_path / "out/trials/lr-low-seed1/checkpoints").exists()
    # The same command has nothing left to do; the failed ones run again if asked.
    count = len(trained.names)
    swept(tmp_path, grid)
    assert len(trained.names) == count
    swept(tmp_path, grid, retry_failed=True)
    assert len(trained.names) == count + 2
    with pytest.raises(SettingsError, match=r"lr-low-seed1 was trained with another configurat"):
        swept(tmp_path, grid.replace("1e-4", "2e-4"))


@pytest.mark.wide
def test_a_sweep_in_a_store_goes_on_elsewhere(tmp_path, trained, monkeypatch, capsys):
    given = [str(write_sweep(tmp_path, "grid: {model.name: [lr, fm]}\n")), "--out", f"{BUCKET}/out"]
    with object_store(tmp_path / "here") as store:
        trained.die_at = 2
        with pytest.raises(SystemExit):
            main(given)
        monkeypatch.setenv("STAMPEDE_STORES", str(tmp_path / "elsewhere"))
        trained.die_at = None
        assert main(given) == 0
        assert trained.names == ["lr-seed1", "fm-seed1", "fm-seed1"]
        assert store.cat_file(f"{BUCKET}/out/results.csv").count(b"\n") == 3
        assert store.exists(f"{BUCKET}/out/trials/lr-seed1/summary.json")
        # What is wrong is told of what the user wrote.
        assert main([*given, "optim.dense.lr=0.01"]) == 2
        said = capsys.readouterr().err
        assert f"error: {BUCKET}/out: lr-seed1 was trained with another configuration" in said


@pytest.mark.wide
def test_other_seeds_run_with_the_best_value_of_a_tuned_axis(tmp_path, trained):
    published = "published: {theirs: {lr: 0.7}}\n"
    swept(tmp_path, GRID + "tune: rate\nmetrics: [auc, parameters]\n" + published)
    tried = [f"{name}-{rate}-seed1" for name in ("lr", "fm") for rate in ("low", "too-high")]
    assert trained.names == [*tried[:2], "lr-low-seed2", *tried[2:], "fm-low-seed2"]
    rows = rows_of(tmp_path)
    assert [row["seeds"] for row in rows] == ["2", "2"] and {r["rate"] for r in rows} == {"low"}
    assert all(float(row["parameters_mean"]) > 1000 for row in rows)
    text = (tmp_path / "out/results.md").read_text()
    assert "published AUC, theirs" in text and "| 0.7000 |" in text


@pytest.mark.slow
@pytest.mark.usefixtures("registered")
def test_trials_are_not_reused_if_the_networks_file_has_changed(tmp_path):
    own = own_network(tmp_path, "numbers_only", NUMBERS_ONLY)
    text = f"grid: {{optim.dense.lr: [1e-4]}}\noverrides: {json.dumps(own)}\n"
    swept(tmp_path, text)
    (tmp_path / "own.py").write_text(NUMBERS_ONLY.replace("return self", "return -self"))
    with pytest.raises(SettingsError, match="was trained with another configuration"):
        swept(tmp_path, text)


@pytest.mark.slow
def test_if_every_trial_fails(tmp_path):
    with pytest.raises(TrainingStoppedError, match=r"all trials failed, the first with: .*--retry"):
        swept(tmp_path, "grid: {optim.dense.lr: [1e38]}\n", "optim.dense.schedule.warmup=0")
    assert rows_of(tmp_path)[0]["failed"] == "1"


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "grid: not given"),
        ("grid: {batch: [1024]}", "batch: found [1024]; write a key, such as train.batch_size"),
        ("grid: {train.batch_size: []}", "train.batch_size: found []"),
        ("grid: {a.b: [1]}\ntune: c", "tune: found 'c'; write one of a.b"),
        ("grid: {train.epochs: [1, 2]}\nexclude: ['3']", "exclude: found '3'; write one of 1, 2"),
        ("grid: {train.epochs: [1]}\nseeds: [1, 1]", "write each seed once"),
        ("grid: {train.epochs: [1]}\nsmal: {}", "smal: unknown key; did you mean 'small'?"),
        ("grid: {x: {a: [run.seed=1]}}", "override 'run.seed=1': a sweep sets it itself"),
        ("grid: {x: {a: [run]}}", "override 'run': write section.key=value"),
        ("grid: {train.epoch: [1]}", "1: configuration"),
    ],
)
def test_mistakes_get_a_sentence(tmp_path, capsys, text, words):
    path = write_sweep(tmp_path, text + "\n")
    assert main([str(path), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.count("error: ") == 1 and (words in said or "train.epoch: unknown key" in said)
    assert not (tmp_path / "out/trials").exists()


def test_the_small_form(tmp_path, capsys):
    text = "grid: {x: {a: [], b: []}}\nsmall: {grid: {x: {c: []}}, seeds: [7]}\n"
    small = load_sweep(write_sweep(tmp_path, text), small=True)
    assert small.grid == {"x": {"c": []}} and small.seeds == [7]
    path = write_sweep(tmp_path, "grid: {train.epochs: [1]}\n")
    assert main([str(path), "--small"]) == 2
    assert "no section `small`" in capsys.readouterr().err


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs/sweeps").glob("*.yaml")), ids=lambda p: p.stem
)
def test_shipped_sweeps_can_be_used(path, small, tmp_path, monkeypatch):
    sweep = load_sweep(path, small and "small:" in path.read_text())
    job = (path.parent / sweep.config).read_text()
    is_log = "kind: criteo" in job or "kind: avazu" in job
    data = ["data.path=log.tsv"] if is_log else []
    runner = module.Runner(path, sweep, tmp_path, data, False)
    for point in sweep.points():
        runner.checked(point, sweep.seeds[0])


def test_the_laboratory_uses_the_public_api_only():
    public = {"stampede", "stampede.data", "stampede.models", "stampede.optim"}
    public |= {"stampede.files", "stampede.lease", "stampede.settings", "stampede.stores"}
    files = list((ROOT / "lab").rglob("*.py"))
    assert len(files) > 5
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                is_own = (name or "").startswith("stampede.lab")
                assert is_own or name in public or not name.startswith("stampede"), (file, name)
