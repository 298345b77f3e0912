"""Disks that become full while a run is written: what is whole stays whole, and it is said."""

import json
import threading
from contextlib import ExitStack

import pytest

from stampede.engine.checkpoint.retention import newest, verify
from stampede.engine.errors import exit_status
from stampede.engine.run_folder import RunFolder
from stampede.engine.start_up import quiet_libraries
from support.full_disk import files_of_at_most
from support.jobs import lines, run_small, without_times


@pytest.fixture
def quiet(monkeypatch):
    """As in the launcher."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    quiet_libraries()


@pytest.mark.slow
def test_metrics_that_cannot_be_written(tmp_path, quiet, capsys):
    """Room comes and goes while the run ends; what it writes then is whole lines."""
    overrides = ["train.log_every=1", "train.epochs=3", "evaluate.every_epochs=3"]
    with files_of_at_most(3000):
        assert exit_status(lambda: run_small(tmp_path, overrides)) == 1
    said = capsys.readouterr()
    assert "small: results cannot be written (File too large); make room" in said.err
    assert "Traceback" not in said.err + said.out
    run = tmp_path / "small"
    logged = lines(run)
    assert len(logged) > 3 and (run / "metrics.jsonl").stat().st_size <= 3000
    steps = [line["step"] for line in logged if line["kind"] == "train"]
    assert steps == list(range(1, len(steps) + 1))
    run_small(tmp_path, [*overrides, "checkpoint.resume=auto"])
    assert json.loads((run / "summary.json").read_text())["epochs"] == 3


@pytest.mark.slow
def test_a_disk_that_is_full_from_the_start(tmp_path, quiet, capsys):
    run_small(tmp_path, [])
    before = without_times(tmp_path / "small")
    for overrides in (["run.name=new"], ["checkpoint.resume=auto", "train.epochs=2"]):
        capsys.readouterr()
        with files_of_at_most(0):
            status = exit_status(lambda overrides=overrides: run_small(tmp_path, overrides))
        said = capsys.readouterr()
        assert status in (1, 2)
        assert "(File too large)" in said.err and "Traceback" not in said.err + said.out
    assert without_times(tmp_path / "small") == before
    run_small(tmp_path, ["checkpoint.resume=auto", "train.epochs=2"])


@pytest.mark.slow
def test_checkpoints_that_cannot_be_written(tmp_path, quiet, capsys):
    overrides = ["train.epochs=2", "checkpoint.every_steps=3", "checkpoint.asynchronous=false"]
    run_small(tmp_path, [*overrides, "train.epochs=1"])
    run = tmp_path / "small"
    kept = newest(run / "checkpoints")
    capsys.readouterr()
    with files_of_at_most(100_000):
        status = exit_status(lambda: run_small(tmp_path, [*overrides, "checkpoint.resume=auto"]))
    said = capsys.readouterr()
    assert status == 1, said.err
    assert "step_00000009: the checkpoint cannot be written, " in said.err
    assert "File too large" in said.err and "earlier ones are untouched" in said.err
    assert "Traceback" not in said.err + said.out
    assert lines(run)[-1]["kind"] == "stopped" and lines(run)[-1]["step"] == 9
    assert newest(run / "checkpoints") == kept
    verify(kept)
    run_small(tmp_path, [*overrides, "checkpoint.resume=auto"])
    run_small(tmp_path, [*overrides, "run.name=whole"])
    assert without_times(run) == without_times(tmp_path / "whole")


@pytest.mark.slow
def test_events_that_cannot_be_written_are_no_loss(tmp_path, quiet, capsys):
    """Those of TensorBoard that are left when a run has ended; its thread says nothing itself."""
    with ExitStack() as stack, RunFolder(tmp_path) as folder:
        # TensorBoard keeps all but the first for two minutes.
        for step in range(1, 50):
            folder.log({"kind": "train", "step": step, "loss": 0.5})
        stack.enter_context(files_of_at_most(100))
    said = capsys.readouterr()
    assert "tensorboard: the last events cannot be written (File too large)" in said.out
    assert "Traceback" not in said.err
    assert len(lines(tmp_path)) == 49
