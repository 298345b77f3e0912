"""Trials that are done, failed or damaged; studies, and their journal."""

import json
import shutil

import pytest

from stampede.engine.errors import RunFolderError, TrainingStoppedError
from stampede.engine.report.run_records import open_runs
from stampede.engine.sweep.run import run_sweep, why
from stampede.engine.sweep.spec import load_sweep
from stampede.settings import SettingsError
from support.own_networks import NUMBERS_ONLY, own_network
from support.sweeping import Started, rows_of, sweep, write_sweep

# The sentence among the output of libraries.
SAID = """\
[W1121 socket.cpp:764] [c10d] The hostname of the client socket cannot be retrieved
error: the loss is nan at step 2; lower the rates
ProcessGroupGloo.cpp: connection closed
"""


@pytest.mark.parametrize(
    "said, status, reason",
    [
        *((text, 1, "the loss is nan at step 2; lower the rates")
          for text in (SAID, SAID.replace("error: ", "error on rank 1: "))),
        # A list belongs to its sentence.
        ("bar\rerror: job.yaml:\n  a: b\n  c: d\nmore\n", 2, "job.yaml: a: b c: d"),
        # Without a sentence, the last line counts.
        ("a\nKeyError: 'x'\n", 1, "exit status 1: KeyError: 'x'"),
        ("", -9, "killed by signal 9"),
    ],
)  # fmt: skip
def test_why_a_run_failed(said, status, reason):
    assert why(said.encode(), status) == reason


TUNED = """
grid:
  model.name: [lr, fm]
  rate:
    low: [optim.dense.lr=1e-4]
    too high: [optim.dense.lr=1e38, optim.dense.schedule.warmup=0]
tune: rate
seeds: [1, 2]
"""


@pytest.mark.slow
def test_the_other_seeds_run_with_the_best_value_of_a_tuned_axis(tmp_path):
    start = Started()
    sweep(tmp_path, TUNED, start)
    tried = ["lr-low-seed1", "lr-too-high-seed1", "fm-low-seed1", "fm-too-high-seed1"]
    assert start.names == [*tried, "lr-low-seed2", "fm-low-seed2"]
    assert [row["seeds"] for row in rows_of(tmp_path)] == ["2", "2"]
    # The same command has nothing left to do.
    sweep(tmp_path, TUNED, start)
    assert len(start.names) == 6


GRID = """
grid:
  rate:
    low: [optim.dense.lr=1e-4]
    too high: [optim.dense.lr=1e38, optim.dense.schedule.warmup=0]
overrides: [evaluate.select_on=test]
"""
LOW = "low-seed1"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A sweep with one finished and one failed trial."""
    folder = tmp_path_factory.mktemp("sweep")
    sweep(folder, GRID, Started())
    return folder


@pytest.fixture
def moved(finished, tmp_path, monkeypatch):
    """The sweep, moved to another folder, which is the working folder."""
    shutil.copytree(finished, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def again(folder, text=GRID, **options):
    """Run the sweep in `out`, a relative path; the sweep and the trials that were started."""
    start = Started()
    found = load_sweep(write_sweep(folder, text), folder=folder.relative_to(folder) / "out")
    files = run_sweep(found, start, **options)
    return found, start.names, files


def test_a_finished_sweep_can_be_moved_and_deletes_checkpoints_if_asked(moved):
    checkpoints = moved / f"out/trials/{LOW}/checkpoints"
    assert checkpoints.exists()
    # As after a kill between the end of a trial and the deletion.
    _, started, files = again(moved, GRID + "keep_checkpoints: false\n")
    # Both trials are recognised, the failed one too.
    assert started == [] and not checkpoints.exists()
    assert {file.name for file in files} == {"results.csv", "results.md", "auc.png", "seconds.png"}
    with pytest.raises(RunFolderError, match=r"optim.dense.lr is 0.0001 there and 0.0002 here"):
        again(moved, GRID.replace("1e-4", "2e-4"))
    assert {run.path.name for run in open_runs([moved / "out"])} >= {LOW}


@pytest.mark.slow
@pytest.mark.usefixtures("registered")
def test_trials_are_not_reused_if_the_networks_file_has_changed(tmp_path):
    own = own_network(tmp_path, "numbers_only", NUMBERS_ONLY)
    text = f"grid: {{optim.dense.lr: [1e-4]}}\noverrides: {json.dumps(own)}\n"
    sweep(tmp_path, text, Started())
    (tmp_path / "own.py").write_text(NUMBERS_ONLY.replace("return self", "return -self"))
    start = Started()
    with pytest.raises(RunFolderError, match=r"own.py has changed since .* was trained"):
        sweep(tmp_path, text, start)
    assert start.names == []


def edit_summary(run, **values):
    path = run / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_an_undefined_auc_is_a_failure_also_when_retrying(moved):
    edit_summary(moved / f"out/trials/{LOW}", auc=None)
    with pytest.raises(TrainingStoppedError, match="AUC of the test part is undefined"):
        again(moved, retry_failed=True)
    assert [row["failed"] for row in rows_of(moved)] == ["1", "1"]


@pytest.mark.parametrize(
    "name, text, sentence",
    [
        ("failures.json", "{", r"failures\.json: damaged .*; delete it"),
        (f"trials/{LOW}/summary.json", "{", rf"summary\.json: damaged .*; delete \S*{LOW} to"),
        (f"trials/{LOW}/summary.json", "{}", r"summary\.json: damaged \(no 'selected_on'\)"),
    ],
)
def test_a_damaged_file_gets_a_sentence(moved, name, text, sentence):
    (moved / "out" / name).write_text(text)
    with pytest.raises(RunFolderError, match=sentence):
        again(moved)


def test_a_full_disk_is_told_of_the_sweeps_folder(moved, monkeypatch):
    (moved / "out/failures.json").unlink()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stampede.engine.sweep.run.write_file", full)
    with pytest.raises(RunFolderError, match=r"out: cannot be written \(No space left"):
        again(moved)


def test_a_trial_that_succeeds_when_it_is_retried_has_no_failure_any_more(tmp_path):
    text = "grid: {optim.dense.lr: [1e-4]}\n"
    with pytest.raises(TrainingStoppedError, match="all 1 trials failed"):
        sweep(tmp_path, text, lambda arguments, log: log.write_text("error: the disk is full\n"))
    sweep(tmp_path, text, Started(), retry_failed=True)
    after = Started()
    sweep(tmp_path, text, after)
    assert after.names == [] and rows_of(tmp_path)[0]["failed"] == "0"


STUDY = """
study:
  parameters:
    optim.embedding.lr: {low: 1e-4, high: 1e-1, log: true}
    train.batch_size: {choices: [128, 256]}
  trials: 3
  metric: logloss
  direction: minimize
"""


@pytest.mark.slow
def test_a_killed_study_goes_on_as_if_nothing_had_happened(tmp_path):
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    sweep(tmp_path / "whole", STUDY, Started())
    with pytest.raises(SystemExit):
        sweep(tmp_path / "killed", STUDY, Started(die_at=2))
    again = Started()
    sweep(tmp_path / "killed", STUDY, again)
    assert again.names == ["trial0001-seed1", "trial0002-seed1"]
    whole = rows_of(tmp_path / "whole")
    assert rows_of(tmp_path / "killed") == whole
    assert len({row["optim.embedding.lr"] for row in whole}) == 3
    assert (tmp_path / "whole/out/study.png").read_bytes().startswith(b"\x89PNG")

    # The best comes first, on the part that selects, not on the test part.
    sought = [float(row["logloss_sought"]) for row in whole]
    on_validation = [
        json.loads(path.read_text())["validation"]["logloss"]
        for path in (tmp_path / "whole/out/trials").glob("*/summary.json")
    ]
    assert sought == pytest.approx(sorted(on_validation))

    # The same study may get more trials; a different study is refused.
    sweep(tmp_path / "killed", STUDY.replace("trials: 3", "trials: 4"), again)
    assert again.names[2:] == ["trial0003-seed1"]
    with pytest.raises(SettingsError, match="a study with another seed"):
        sweep(tmp_path / "killed", STUDY + "  seed: 7\n", Started())
    # A trial has failed if its metric is undefined on the selecting part.
    edit_summary(tmp_path / "killed/out/trials/trial0001-seed1", validation={"logloss": None})
    sweep(tmp_path / "killed", STUDY, Started())
    assert [row["failed"] for row in rows_of(tmp_path / "killed")] == ["0", "0", "1"]


def test_a_study_keeps_the_values_that_it_has_chosen(tmp_path):
    started = []

    def fail(arguments, log):
        started.append(arguments)
        log.write_text("error: out of luck\n")
        return 1

    with pytest.raises(TrainingStoppedError, match=r"all 3 trials failed.*: out of luck; see"):
        sweep(tmp_path, STUDY, fail)
    path = tmp_path / "out/study.json"
    record = json.loads(path.read_text())
    # As if another version of Optuna had chosen it.
    record["chosen"][2]["optim.embedding.lr"] = 0.0123
    path.write_text(json.dumps(record))
    with pytest.raises(TrainingStoppedError):
        sweep(tmp_path, STUDY, fail)
    assert len(started) == 4 and "optim.embedding.lr=0.0123" in started[3]
    path.write_text(path.read_text()[:50])
    with pytest.raises(RunFolderError, match=r"study\.json: damaged .*write another --out"):
        sweep(tmp_path, STUDY, fail)


CLASHING = """
study:
  parameters:
    data.validation_fraction: {choices: [0.0, 0.2]}
    evaluate.select_on: {choices: [validation, test]}
  trials: 6
  sampler: random
"""


@pytest.mark.slow
def test_a_point_with_contradictory_values_is_a_failed_trial(tmp_path):
    first, again = Started(), Started()
    sweep(tmp_path, CLASHING, first)
    rows = rows_of(tmp_path)
    clashes = [
        float(row["data.validation_fraction"]) == 0 and row["evaluate.select_on"] == "validation"
        for row in rows
    ]
    assert 0 < sum(clashes) < 6 and [row["failed"] == "1" for row in rows] == clashes
    assert len(first.names) == 6 - sum(clashes)
    text = " ".join((tmp_path / "out/results.md").read_text().split())
    assert "evaluate.select_on is 'validation' but data.validation_fraction is 0" in text
    sweep(tmp_path, CLASHING, again)
    assert again.names == []
