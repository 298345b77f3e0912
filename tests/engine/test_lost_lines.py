"""Lines and checkpoints of a run that are lost."""

import shutil
from pathlib import Path

import pytest

from stampede.engine.errors import RunFolderError
from support.jobs import run_small, without_times

ALIKE = ["checkpoint.every_steps=3"]
LONG = ["train.epochs=2", *ALIKE]
RESUME = ["checkpoint.resume=auto", *ALIKE]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ended")
    run_small(folder, LONG)
    return folder / "small"


@pytest.fixture
def run(ended, tmp_path):
    """A run that has ended, to be damaged."""
    return Path(shutil.copytree(ended, tmp_path / "small"))


def content_of(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_run_that_has_ended_is_not_begun_anew(run, tmp_path):
    shutil.rmtree(run / "checkpoints")
    before = content_of(run)
    with pytest.raises(RunFolderError, match=r"that has ended, and no checkpoint .*overwrite=true"):
        run_small(tmp_path, [*RESUME, "train.epochs=3"])
    assert content_of(run) == before


@pytest.mark.slow
def test_a_run_that_begins_anew_says_which_lines_it_drops(run, tmp_path, capsys):
    whole = without_times(run)
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()
    run_small(tmp_path, [*LONG, *RESUME])
    said = capsys.readouterr().out
    assert f"the run starts from scratch; {len(whole)} lines of metrics.jsonl are dropped" in said
    assert without_times(run) == whole
    # Nothing is said where nothing is lost.
    run_small(tmp_path, [*RESUME, "run.name=new"])
    assert "starts from scratch" not in capsys.readouterr().out
