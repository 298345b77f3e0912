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


def test_without_optuna_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "optuna", None)
    with pytest.raises(SettingsError, match=r"needs Optuna.*pip install"):
        sweep(tmp_path, STUDY, Started())
    assert not (tmp_path / "out").exists()
