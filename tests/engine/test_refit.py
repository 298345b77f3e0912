"""`train.refit`: validation chooses the epochs, then its rows are trained on, too."""

import json

import pytest
import torch

from stampede import open_run
from stampede.engine.checkpoint.manifest import read_manifest
from stampede.engine.checkpoint.retention import newest
from stampede.engine.config.load import load_config
from stampede.engine.run import run
from stampede.engine.training import trainer
from stampede.settings import SettingsError
from support.jobs import tensors_of
from support.periods import SCHEMA, write_log

GIVEN = ["preset=paper", "train.epochs=5", "train.batch_size=64", "optim.embedding.lr=0.05",
         "optim.dense.lr=0.02", "evaluate.metric=auc", "evaluate.calibrate=auto"]  # fmt: skip
WITHOUT_VALIDATION = ["evaluate.select_on=test", "evaluate.patience=0"]


@pytest.fixture
def trained(tmp_path):
    """Trains `log1.csv` and returns the run."""
    for number in (1, 2, 3):
        write_log(tmp_path / f"log{number}.csv", 10 * number, seed=number)
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    job = tmp_path / "ads.yaml"
    job.write_text(
        f"data: {{kind: table, schema_file: {tmp_path}/schema.yaml, cache: {tmp_path}/cache}}\n"
        f"run: {{dir: {tmp_path}/runs}}\n"
        "model: {name: deepfm, dim: 4, hidden: [8]}\n"
        "evaluate: {compare_with_lr: false}\n"
    )

    def train(name, *overrides):
        given = [f"data.path={tmp_path}/log1.csv", f"run.name={name}", *overrides]
        run(load_config(job, given))
        return open_run(tmp_path / "runs" / name)

    train.folder = tmp_path
    return train


def weights(run_of):
    return tensors_of(newest(run_of.path / "checkpoints"))


def same_bits(one, other):
    found, expected = weights(one), weights(other)
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("split", ["sequential", "files", "by_column"])
def test_it_is_the_run_without_a_validation_part_and_with_the_epochs_it_chose(
    trained, split, capsys
):
    logs = [f"{trained.folder}/log{number}.csv" for number in (1, 2, 3)]
    by_column = ["data.split=by_column", "data.split_column=site", "data.test_values=[s0]"]
    keys, without = {
        "sequential": ([], ["data.validation_fraction=0"]),
        "files": (
            ["data.split=files", f"data.test_path={logs[1]}", f"data.validation_path={logs[2]}"],
            [f"data.path=[{logs[0]},{logs[2]}]", "data.validation_path=''",
             "data.validation_fraction=0"],
        ),
        "by_column": (
            [*by_column, "data.validation_values=[s1]"],
            ["data.validation_values=[]", "data.validation_fraction=0"],
        ),
    }[split]  # fmt: skip
    refitted = trained("refit", *GIVEN, *keys, "train.refit=true")
    printed = " ".join(capsys.readouterr().out.split())
    chose = open_run(f"{refitted.path}-selection")
    epochs = chose.summary["best_epoch"]
    # Of the first two, an epoch before the last is the best.
    assert 1 <= epochs < 5 or split == "by_column"
    assert f"epoch {epochs} was the best: training again" in printed
    assert f"epoch {epochs}: the only one that was evaluated" in printed
    given = [*GIVEN, *keys, *without, *WITHOUT_VALIDATION, f"train.epochs={epochs}"]
    expected = trained("expected", *given)
    assert same_bits(refitted, expected)
    # The scores are calibrated as those of the first run.
    ((scale, shift),) = chose.metrics["validation"]["logit_calibration"]
    assert read_manifest(newest(refitted.path / "checkpoints")).progress.calibration == [
        [scale, shift]
    ]
    if (scale, shift) != (1, 0):
        ours, others = (run_of.summary["last"]["test"] for run_of in (refitted, expected))
        assert ours["auc"] == others["auc"] and ours["logloss"] != others["logloss"]
    rows = refitted.summary["rows"]
    first = chose.summary["rows"]
    assert rows == {"train": first["train"] + first["validation"], "test": first["test"]}
    assert not same_bits(refitted, chose)
    lines = map(json.loads, (refitted.path / "metrics.jsonl").read_text().splitlines())
    assert [line["part"] for line in lines if line["kind"] == "evaluation"] == ["test"]


@pytest.mark.slow
def test_the_settings_are_those_that_were_chosen_for_the_first_run(trained):
    refitted = trained("refit", "train.refit=true", "train.epochs=2")
    chose = open_run(f"{refitted.path}-selection")
    assert refitted.config.optim == chose.config.optim
    assert refitted.config.train.batch_size == chose.config.train.batch_size
    assert chose.config.optim.embedding.l2 == pytest.approx(4 / 324)


@pytest.mark.slow
def test_an_interrupted_refit_continues_with_the_same_bits(trained, monkeypatch):
    expected = trained("whole", *GIVEN, "train.refit=true")
    steps, original = 0, trainer.train_step

    def failing(*arguments, **options):
        nonlocal steps
        steps += 1
        # In the first run, then in the second.
        if steps in (9, 40):
            raise KeyboardInterrupt
        return original(*arguments, **options)

    monkeypatch.setattr(trainer, "train_step", failing)
    given = [*GIVEN, "train.refit=true", "checkpoint.resume=auto", "checkpoint.every_steps=2"]
    failed = 0
    while True:
        try:
            found = trained("killed", *given)
            break
        except KeyboardInterrupt:
            failed += 1
    assert failed == 2 and same_bits(found, expected)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["evaluate.select_on=test"], "train.refit needs the validation part, which this run"),
        (["data.split=periods"], "train.refit needs the validation part, which this run"),
        (
            ["optim.dense.plateau.factor=0.5"],
            "plateau goes by the validation part, which train.refit",
        ),
    ],
)
def test_mistakes_are_told_in_a_sentence(trained, given, said):
    with pytest.raises(SettingsError, match=said):
        trained("wrong", "train.refit=true", *given)


@pytest.mark.slow
def test_a_run_in_the_way_is_told_before_anything_is_trained(trained):
    trained("taken", *GIVEN)
    with pytest.raises(Exception, match=r"taken exists; write run\.overwrite=true"):
        trained("taken", *GIVEN, "train.refit=true")
    assert not (trained.folder / "runs/taken-selection").exists()
    trained("taken", *GIVEN, "train.refit=true", "run.overwrite=true")
