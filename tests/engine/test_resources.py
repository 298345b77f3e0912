"""Disks that become full and memory that runs out: what is whole stays whole, and it is said."""

import errno
import json
import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from unittest import mock

import numpy as np
import pytest
import torch

from stampede.engine.checkpoint.retention import newest, verify
from stampede.engine.exit_status import exit_status, lacks_memory, what_was_asked
from stampede.engine.results.run_folder import RunFolder
from stampede.engine.start_up import quiet_libraries
from support.full_disk import files_of_at_most
from support.jobs import SMALL, lines, run_small, without_times
from support.paths import ROOT
from support.waiting import HANG


@pytest.fixture
def refused(monkeypatch, capsys):
    """What a run says, as in the launcher, whose files may have only so many bytes."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    quiet_libraries()

    def run(folder, overrides, most, statuses=(1,)):
        capsys.readouterr()
        with files_of_at_most(most):
            assert exit_status(lambda: run_small(folder, overrides)) in statuses
        said = capsys.readouterr()
        assert "File too large" in said.err and "Traceback" not in said.err + said.out
        return said.err

    return run


@pytest.mark.slow
def test_metrics_that_cannot_be_written(tmp_path, refused):
    """Room comes and goes while the run ends; what it writes then is whole lines."""
    overrides = ["train.log_every=1", "train.epochs=3", "evaluate.every_epochs=3"]
    said = refused(tmp_path, overrides, 3000)
    assert "small: results cannot be written (File too large); make room" in said
    run = tmp_path / "small"
    logged = lines(run)
    assert len(logged) > 3 and (run / "metrics.jsonl").stat().st_size <= 3000
    steps = [line["step"] for line in logged if line["kind"] == "train"]
    assert steps == list(range(1, len(steps) + 1))
    run_small(tmp_path, [*overrides, "checkpoint.resume=auto"])
    assert json.loads((run / "summary.json").read_text())["epochs"] == 3


@pytest.mark.slow
def test_a_disk_that_is_full_from_the_start(tmp_path, refused):
    run_small(tmp_path, [])
    before = without_times(tmp_path / "small")
    for overrides in (["run.name=new"], ["checkpoint.resume=auto", "train.epochs=2"]):
        refused(tmp_path, overrides, 0, (1, 2))
    assert without_times(tmp_path / "small") == before
    run_small(tmp_path, ["checkpoint.resume=auto", "train.epochs=2"])


@pytest.mark.wide
def test_checkpoints_that_cannot_be_written(tmp_path, refused):
    overrides = ["train.epochs=2", "checkpoint.every_steps=9", "checkpoint.asynchronous=false"]
    run_small(tmp_path, [*overrides, "train.epochs=1"])
    run = tmp_path / "small"
    kept = newest(run / "checkpoints")
    said = refused(tmp_path, [*overrides, "checkpoint.resume=auto"], 100_000)
    assert "step_00000009: the checkpoint cannot be written, " in said
    assert "earlier ones are untouched" in said
    assert lines(run)[-1]["kind"] == "stopped" and lines(run)[-1]["step"] == 9
    assert newest(run / "checkpoints") == kept
    verify(kept)
    run_small(tmp_path, [*overrides, "checkpoint.resume=auto"])
    run_small(tmp_path, [*overrides, "run.name=whole"])
    assert without_times(run) == without_times(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.usefixtures("refused")
def test_events_that_cannot_be_written_are_no_loss(tmp_path, capsys):
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


ON_GPU = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 1.10 GiB is free."
)
OF_TORCH = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 5536481280 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.wide
def test_tables_that_get_no_memory(tmp_path):
    """For which the machine has enough, but not the process."""
    (tmp_path / "small.yaml").write_text("")
    done = subprocess.run(
        [sys.executable, ROOT / "tests/support/short_of_memory.py", str(800 << 20), "small.yaml",
         *SMALL, "data.scale=0.008", "model.dim=1000"],
        capture_output=True, text=True, cwd=tmp_path, timeout=HANG,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "error: out of memory (DefaultCPUAllocator: can't" in done.stderr
    assert "model.dim, or more processes" in done.stderr


@pytest.mark.parametrize(
    "failure, said",
    [
        (MemoryError(), "MemoryError"),
        (torch.cuda.OutOfMemoryError(ON_GPU), ON_GPU),
        (RuntimeError(OF_TORCH), OF_TORCH.partition("err == 0. ")[2]),
        (RuntimeError("CUDA error: out of memory\nmore"), "CUDA error: out of memory"),
        (RuntimeError("std::bad_alloc"), "std::bad_alloc"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "[Errno 12] Cannot allocate memory"),
    ],
)
def test_a_lack_of_memory_is_said(capsys, failure, said):
    assert lacks_memory(failure) and what_was_asked(failure) == said
    assert exit_status(mock.Mock(side_effect=failure)) == 1
    printed = capsys.readouterr().err
    assert f"error: out of memory ({said}); try a smaller train.batch_size, " in printed
    assert "checkpoint.resume=auto continues from the newest checkpoint" in printed


def test_which_errors_mean_a_lack_of_memory():
    # Of more bytes than there are addresses, so that nothing is allocated.
    for allocate in (lambda: np.empty(1 << 55), lambda: torch.empty(1 << 56)):
        with pytest.raises((MemoryError, RuntimeError)) as raised:
            allocate()
        assert lacks_memory(raised.value)
    for failure in (RuntimeError("a mistake of ours"), OSError(28, "full"), ValueError("memory")):
        assert not lacks_memory(failure)
