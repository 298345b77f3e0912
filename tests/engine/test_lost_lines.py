"""Lines and checkpoints of a run that are lost or damaged, and what stands in their place."""

import json
import shutil

import pytest

from stampede.engine.errors import RunFolderError
from support.jobs import lines, run_small, without_times

# Advice on logistic regression is logged after the last checkpoint, which does not count it.
ALIKE = ["checkpoint.every_steps=3", "evaluate.compare_with_lr=false"]
LONG = ["train.epochs=2", *ALIKE]
RESUME = ["checkpoint.resume=auto", *ALIKE]


def content_of(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_run_that_has_ended_is_not_begun_anew(tmp_path):
    run_small(tmp_path, LONG)
    run = tmp_path / "small"
    shutil.rmtree(run / "checkpoints")
    before = content_of(run)
    with pytest.raises(RunFolderError, match=r"that has ended, and no checkpoint .*overwrite=true"):
        run_small(tmp_path, [*RESUME, "train.epochs=3"])
    assert content_of(run) == before


def test_a_run_that_begins_anew_says_which_lines_it_drops(tmp_path, capsys):
    run_small(tmp_path, LONG)
    run = tmp_path / "small"
    whole = without_times(run)
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()
    capsys.readouterr()
    run_small(tmp_path, [*LONG, *RESUME])
    said = capsys.readouterr().out
    assert f"the run begins anew; {len(whole)} lines of metrics.jsonl are dropped" in said
    assert without_times(run) == whole
    # Nothing is said where nothing is lost.
    run_small(tmp_path, [*RESUME, "run.name=new"])
    assert "begins anew" not in capsys.readouterr().out


def test_lines_that_are_missing_are_told(tmp_path, capsys):
    run_small(tmp_path, LONG)
    run = tmp_path / "small"
    count = len(lines(run))
    (run / "metrics.jsonl").unlink()
    capsys.readouterr()
    run_small(tmp_path, [*RESUME, "train.epochs=3"])
    said = capsys.readouterr().out
    assert f"metrics.jsonl: {count} lines had been written by the step that" in said
    assert f"and {count} of them are missing" in said
    kept = lines(run)
    # What is lost is told once.
    run_small(tmp_path, [*RESUME, "train.epochs=3"])
    assert "of them are missing" not in capsys.readouterr().out and lines(run) == kept


def test_a_damaged_line_is_left_out(tmp_path, capsys):
    run_small(tmp_path, LONG)
    run = tmp_path / "small"
    logged = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    logged[2] = b"garbage\xff{\n"
    logged[4] = b"17\n"
    (run / "metrics.jsonl").write_bytes(b"".join(logged))
    capsys.readouterr()
    run_small(tmp_path, [*RESUME, "train.epochs=3"])
    assert "metrics.jsonl: damaged lines are left out: 3, 5" in capsys.readouterr().out
    kept = [json.loads(line) for number, line in enumerate(logged) if number not in (2, 4)]
    assert lines(run)[: len(kept)] == kept
    assert (run / "curve.png").exists()
    again = lines(run)
    run_small(tmp_path, [*RESUME, "train.epochs=3"])
    said = capsys.readouterr().out
    assert lines(run) == again and "are missing" not in said and "damaged lines" not in said


@pytest.mark.parametrize("name", ["checkpoints", "logs", "tensorboard"])
def test_a_file_in_the_place_of_a_folder(tmp_path, name):
    run_small(tmp_path, LONG)
    shutil.rmtree(tmp_path / "small" / name)
    (tmp_path / "small" / name).write_text("")
    with pytest.raises(RunFolderError, match=f"{name} is a file, where a run keeps a folder; move"):
        run_small(tmp_path, RESUME)


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "config.yaml", "curve.png"])
def test_a_folder_in_the_place_of_a_file(tmp_path, name):
    run_small(tmp_path, LONG)
    (tmp_path / "small" / name).unlink()
    (tmp_path / "small" / name).mkdir()
    with pytest.raises(RunFolderError, match=f"{name} is a folder, where a run keeps a file; move"):
        run_small(tmp_path, RESUME)
