"""Trials that are done, failed or damaged; studies, and their journal."""

import json
import os
import shutil
import signal

import pytest

from stampede.engine.errors import RunFolderError, TrainingStoppedError
from stampede.engine.report.run_records import open_runs
from stampede.engine.sweep.run import run_sweep, why
from stampede.engine.sweep.spec import load_sweep
from stampede.models.registry import _NETWORKS
from stampede.settings import SettingsError
from support.own_networks import NUMBERS_ONLY, own_network
from support.sweeping import Started, rows_of, sweep, write_sweep

# What libraries say around the sentence.
SAID = """\
[W1121 socket.cpp:764] [c10d] The hostname of the client socket cannot be retrieved
error: the loss is nan at step 2; lower the rates
ProcessGroupGloo.cpp: connection closed
"""


SENTENCE = "the loss is nan at step 2; lower the rates"
LONG = "the loss is nan " + "and so on " * 100 + "end"


@pytest.mark.parametrize(
    "said, status, reason",
    [
        (SAID, 1, SENTENCE),
        (SAID.replace("error: the", "error on rank 1: the"), 1, SENTENCE),
        # A list belongs to its sentence.
        ("error: job.yaml:\n  train.epochs: found 0\n  a: b\nmore\n", 2,
         "job.yaml: train.epochs: found 0 a: b"),
        (f"error: {LONG}\n", 1, LONG),
        (f"{LONG}\n", 1, f"exit status 1: {LONG}"),
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
    assert "`fm-too-high-seed1`: " in (tmp_path / "out/results.md").read_text()
    # The same command has nothing left to do.
    sweep(tmp_path, TUNED, start)
    assert len(start.names) == 6


GRID = """
grid:
  $rate_{:
    _low: [optim.dense.lr=1e-4]
    too high: [optim.dense.lr=1e38, optim.dense.schedule.warmup=0]
overrides: [evaluate.select_on=test]
"""
LOW, HIGH = "low-seed1", "too-high-seed1"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A sweep of a trial that was done and one that failed."""
    folder = tmp_path_factory.mktemp("sweep")
    sweep(folder, GRID.replace("_low", "low"), Started())
    return folder


@pytest.fixture
def moved(finished, tmp_path, monkeypatch):
    """The sweep in another folder, the working one."""
    shutil.copytree(finished, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def again(folder, text=GRID, **options):
    """Run the sweep in `out`, a relative path; the sweep and the trials that were started."""
    start = Started()
    found = load_sweep(write_sweep(folder, text), folder=folder.relative_to(folder) / "out")
    files = run_sweep(found, start, **options)
    return found, start.names, files


@pytest.mark.slow
def test_a_sweep_may_be_moved_and_its_folder_written_in_another_way(moved):
    _, started, files = again(moved)
    # Neither trial is taken for one of another configuration, also not the one that failed.
    assert started == []
    assert {file.name for file in files} == {"results.csv", "results.md", "auc.png", "seconds.png"}
    with pytest.raises(RunFolderError, match=r"optim.dense.lr is 0.0001 there and 0.0002 here"):
        again(moved, GRID.replace("1e-4", "2e-4"))
    assert {run.path.name for run in open_runs([moved / "out"])} >= {LOW}


def test_selection_on_the_test_part_is_said_everywhere(moved, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "stampede.engine.sweep.pictures.to_png", lambda figure: drawn.append(figure) or b""
    )
    again(moved)
    (low, _) = rows_of(moved)
    lines = (moved / f"out/trials/{LOW}/metrics.jsonl").read_text().splitlines()
    (test,) = [one for one in map(json.loads, lines) if one["kind"] == "evaluation"]
    assert test["part"] == "test" and float(low["auc_mean"]) == test["auc"]
    assert low["selected_on"] == "test"
    text = (moved / "out/results.md").read_text()
    assert "Data: synthetic; 600 training rows, 200 test rows; selected on the test part." in text
    assert "optimistic" in text
    for figure in drawn:
        assert figure.get_suptitle().startswith("best epoch chosen on the test part")


def test_a_kill_before_the_end_was_noted_leaves_no_checkpoints(moved):
    checkpoints = moved / f"out/trials/{LOW}/checkpoints"
    assert checkpoints.exists()
    again(moved, GRID + "keep_checkpoints: false\n")
    assert not checkpoints.exists()


@pytest.mark.slow
def test_trials_of_a_network_whose_file_has_changed_are_not_taken_for_its(tmp_path, monkeypatch):
    monkeypatch.setattr("stampede.models.registry._NETWORKS", dict(_NETWORKS))
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


@pytest.mark.parametrize("retry_failed", [False, True])
def test_an_undefined_auc_is_a_failure_whenever_it_is_found(moved, retry_failed):
    edit_summary(moved / f"out/trials/{LOW}", auc=None)
    with pytest.raises(TrainingStoppedError, match="AUC of the test part is undefined"):
        again(moved, retry_failed=retry_failed)
    assert [row["failed"] for row in rows_of(moved)] == ["1", "1"]
    assert "`--retry-failed` runs them again" in (moved / "out/results.md").read_text()


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


RUN = f"trials/{LOW}"


@pytest.mark.parametrize(
    "damage, sentence",
    [
        (write("failures.json", "{"), r"failures\.json: damaged .*; delete it"),
        (write("failures.json", "[]"), r"failures\.json: damaged .*; delete it"),
        (write("failures.json", '{"a": {}}'), r"failures\.json: damaged \(no 'message'\)"),
        (write(f"{RUN}/summary.json", "{"), rf"summary\.json: damaged .*; delete \S*{LOW} to"),
        (write(f"{RUN}/summary.json", "{}"), r"summary\.json: damaged \(no 'selected_on'\)"),
    ],
)
def test_what_is_damaged_gets_a_sentence(moved, damage, sentence):
    damage(moved / "out")
    with pytest.raises(RunFolderError, match=sentence):
        again(moved)


def test_a_link_out_of_the_folder_of_a_sweep_is_refused(moved, tmp_path):
    """Checkpoints of trials that have ended are deleted."""
    trial = moved / "out/trials" / LOW
    trial.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/checkpoints").mkdir(exist_ok=True)
    trial.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunFolderError, match=rf"{LOW} is a link to outside .*out"):
        again(moved)
    assert (tmp_path / "elsewhere/checkpoints").is_dir()


def test_an_error_of_a_trial_is_not_one_of_the_folder(moved, monkeypatch):
    (moved / "out/failures.json").unlink()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stampede.engine.sweep.run.write_file", full)
    with pytest.raises(RunFolderError, match=r"out: cannot be written \(No space left"):
        again(moved)


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


@pytest.mark.slow
def test_a_point_whose_values_do_not_go_together_is_a_failed_trial(tmp_path):
    first = Started()
    sweep(tmp_path, CLASHING, first)
    rows = rows_of(tmp_path)
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


@pytest.mark.slow
def test_an_undefined_metric_of_the_part_that_selects_is_a_failed_trial(tmp_path):
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
    assert sorted(row["failed"] for row in rows_of(tmp_path)) == ["0", "0", "1"]
    assert told_as_failed(tmp_path) == 1
    text = table_of(tmp_path)
    assert "`trial0000-seed1`: the AUC of the validation part is undefined" in text


ONE_TRIAL = """
study:
  parameters: {optim.embedding.lr: {low: 1e-4, high: 1e-2}}
  trials: 1
  metric: logloss
  direction: minimize
"""


@pytest.fixture(scope="module")
def finished_study(tmp_path_factory):
    """A study of one trial."""
    folder = tmp_path_factory.mktemp("study")
    sweep(folder, ONE_TRIAL, Started())
    return folder


@pytest.fixture
def killed(finished_study, tmp_path, monkeypatch):
    """The study in another folder, the working one."""
    shutil.copytree(finished_study, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def soon():
    """A minute, as Optuna waits for its lock without end."""

    def too_late(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def started_again(folder, text=ONE_TRIAL):
    return again(folder, text)[1]


@pytest.mark.slow
def test_a_kill_while_optuna_wrote_neither_hangs_nor_damages(killed, soon):
    os.symlink("out/study.log", killed / "out/study.log.lock")
    (killed / "out/study.log.lock0815.rename").write_text("")
    with (killed / "out/study.log").open("a") as journal:
        journal.write('{"op_code":5,"worker_id":"of the kil')
    assert started_again(killed) == []
    # A new trial is written to the journal, too.
    assert started_again(killed, ONE_TRIAL.replace("trials: 1", "trials: 2")) == ["trial0001-seed1"]
    assert [path.name for path in (killed / "out").glob("study.log*")] == ["study.log"]


@pytest.mark.parametrize("line", ["{\n", "[]\n", '{"op_code": 99}\n', "\xff\n"])
def test_a_damaged_journal_gets_a_sentence(killed, line):
    path = killed / "out/study.log"
    path.write_bytes(line.encode("latin1") + path.read_bytes())
    with pytest.raises(RunFolderError, match=r"study\.log: damaged \(.*write another --out"):
        started_again(killed)


def test_a_renamed_file_goes_on_with_its_study(killed):
    renamed = write_sweep(killed, ONE_TRIAL).rename(killed / "renamed.yaml")
    start = Started()
    run_sweep(load_sweep(renamed, folder=killed / "out"), start)
    assert start.names == []
    with pytest.raises(Exception, match="a study with another seed"):
        started_again(killed, ONE_TRIAL + "  seed: 7\n")
