"""Studies by Optuna."""

import csv
import json

import pytest

from stampede.engine.sweeps import study
from stampede.settings import SettingsError
from support.sweeping import Started, sweep

STUDY = """
study:
  parameters:
    optim.embedding.lr: {low: 1e-4, high: 1e-1, log: true}
    train.batch_size: {choices: [128, 256]}
  trials: 3
  metric: logloss
  direction: minimize
"""


# Of a line of Optuna's journal that tells a trial's end, and of a trial that failed.
TELL, FAIL = 6, 3


def found_in(folder):
    with (folder / "out/results.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_killed_study_goes_on_as_if_nothing_had_happened(tmp_path):
    pytest.importorskip("optuna")
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    sweep(tmp_path / "whole", STUDY, Started())
    with pytest.raises(SystemExit):
        sweep(tmp_path / "killed", STUDY, Started(die_at=2))
    again = Started()
    sweep(tmp_path / "killed", STUDY, again)
    assert again.names == ["trial0001-seed1", "trial0002-seed1"]
    whole = found_in(tmp_path / "whole")
    assert found_in(tmp_path / "killed") == whole
    assert len({row["optim.embedding.lr"] for row in whole}) == 3

    # The best comes first, on the part that selects, not on the test part.
    sought = [float(row["logloss_sought"]) for row in whole]
    assert sought == sorted(sought)
    lines = [
        json.loads(line)
        for run in (tmp_path / "whole/out/trials").glob("*/metrics.jsonl")
        for line in run.read_text().splitlines()
    ]
    on_validation = [line["logloss"] for line in lines if line.get("part") == "validation"]
    assert sought == pytest.approx(sorted(on_validation))
    assert (tmp_path / "whole/out/study.png").read_bytes().startswith(b"\x89PNG")

    with pytest.raises(SettingsError, match="a study with another seed"):
        sweep(tmp_path / "killed", STUDY + "  seed: 7\n", Started())


def table_of(folder):
    """The Markdown without its line ends, whose places depend on the length of paths."""
    return " ".join((folder / "out/results.md").read_text().split())


def told_as_failed(folder):
    """Trials that Optuna's journal knows as failed."""
    lines = map(json.loads, (folder / "out/study.log").read_text().splitlines())
    return [line["state"] for line in lines if line["op_code"] == TELL].count(FAIL)


CLASHING = """
study:
  parameters:
    data.validation_fraction: {choices: [0.0, 0.2]}
    evaluate.select_on: {choices: [validation, test]}
  trials: 6
  sampler: random
"""


def test_a_point_whose_values_do_not_go_together_is_a_failed_trial(tmp_path):
    pytest.importorskip("optuna")
    first = Started()
    sweep(tmp_path, CLASHING, first)
    rows = found_in(tmp_path)
    clashing = [
        row
        for row in rows
        if float(row["data.validation_fraction"]) == 0 and row["evaluate.select_on"] == "validation"
    ]
    assert 0 < len(clashing) < len(rows) == 6
    assert {row["failed"] for row in clashing} == {"1"}
    assert {row["failed"] for row in rows if row not in clashing} == {"0"}
    assert len(first.names) == 6 - len(clashing)
    text = table_of(tmp_path)
    assert "evaluate.select_on is 'validation' but data.validation_fraction is 0" in text
    # Optuna knows it as failed, and does not ask for it again.
    again = Started()
    sweep(tmp_path, CLASHING, again)
    assert again.names == []
    assert told_as_failed(tmp_path) == len(clashing)


def test_an_undefined_metric_of_the_part_that_selects_is_a_failed_trial(tmp_path):
    pytest.importorskip("optuna")
    text = STUDY.replace("logloss", "auc").replace("minimize", "maximize")
    start = Started()

    def die_before_it_is_noted(*arguments):
        start(*arguments)
        raise SystemExit

    with pytest.raises(SystemExit):
        sweep(tmp_path, text, die_before_it_is_noted)
    path = tmp_path / "out/trials/trial0000-seed1/summary.json"
    summary = json.loads(path.read_text())
    summary["validation"]["auc"] = None
    path.write_text(json.dumps(summary))
    sweep(tmp_path, text, Started())
    assert sorted(row["failed"] for row in found_in(tmp_path)) == ["0", "0", "1"]
    assert told_as_failed(tmp_path) == 1
    text = table_of(tmp_path)
    assert "`trial0000-seed1`: the AUC of the validation part is undefined" in text


def test_without_optuna_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "optuna", None)
    with pytest.raises(SettingsError, match=r"needs Optuna.*pip install"):
        sweep(tmp_path, STUDY, Started())
    assert not (tmp_path / "out").exists()
