"""A study's journal after a kill, and when it is damaged."""

import os
import shutil
import signal

import pytest

from stampede.engine.errors import RunFolderError
from stampede.engine.sweeps.run import run_sweep
from stampede.engine.sweeps.sweep import load_sweep
from support.sweeping import Started, sweep, write_sweep

STUDY = """
study:
  parameters: {optim.embedding.lr: {low: 1e-4, high: 1e-2}}
  trials: 1
  metric: logloss
  direction: minimize
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A study of one trial."""
    pytest.importorskip("optuna")
    folder = tmp_path_factory.mktemp("study")
    sweep(folder, STUDY, Started())
    return folder


@pytest.fixture
def killed(finished, tmp_path, monkeypatch):
    """The study in another folder, the working one."""
    shutil.copytree(finished, tmp_path / "here")
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


def again(folder, text=STUDY):
    """Run the study in `out`, given as a relative folder; the trials that were started."""
    start = Started()
    run_sweep(
        load_sweep(write_sweep(folder, text), folder=folder.relative_to(folder) / "out"), start
    )
    return start.names


def test_a_kill_while_optuna_wrote_neither_hangs_nor_damages(killed, soon):
    os.symlink("out/study.log", killed / "out/study.log.lock")
    (killed / "out/study.log.lock0815.rename").write_text("")
    with (killed / "out/study.log").open("a") as journal:
        journal.write('{"op_code":5,"worker_id":"of the kil')
    assert again(killed) == []
    # A new trial is written to the journal, too.
    assert again(killed, STUDY.replace("trials: 1", "trials: 2")) == ["trial0001-seed1"]
    assert [path.name for path in (killed / "out").glob("study.log*")] == ["study.log"]


@pytest.mark.parametrize("line", ["{\n", "[]\n", '{"op_code": 99}\n', "\xff\n"])
def test_a_damaged_journal_gets_a_sentence(killed, line):
    path = killed / "out/study.log"
    path.write_bytes(line.encode("latin1") + path.read_bytes())
    with pytest.raises(RunFolderError, match=r"study\.log: is damaged \(.*write another --out"):
        again(killed)


def test_a_renamed_file_goes_on_with_its_study(killed):
    renamed = write_sweep(killed, STUDY).rename(killed / "renamed.yaml")
    start = Started()
    run_sweep(load_sweep(renamed, folder=killed / "out"), start)
    assert start.names == []
    with pytest.raises(Exception, match="a study with another seed"):
        again(killed, STUDY + "  seed: 7\n")
