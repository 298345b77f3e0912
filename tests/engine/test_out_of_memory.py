"""Memory that runs out: a sentence with the plan's figures and what to lower."""

import errno
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from stampede.engine import build as building
from stampede.engine.config import load_config
from stampede.engine.exit_status import exit_status
from stampede.engine.lack_of_memory import LackOfMemoryError, lacks_memory, what_was_asked
from stampede.engine.planning.figures import MEMORY, Figures
from stampede.engine.planning.remedies import what_to_lower
from support.jobs import SMALL, run_small, small_config, without_times
from support.paths import ROOT
from support.stopping import before_step

ON_GPU = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 1.10 GiB is free."
)
OF_TORCH = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 5536481280 bytes. Error code 12 (Cannot allocate memory)"
)


def out_of_memory():
    raise torch.cuda.OutOfMemoryError(ON_GPU)


def test_tables_that_get_no_memory(tmp_path):
    """For which the machine has enough, but not the process."""
    (tmp_path / "small.yaml").write_text("")
    done = subprocess.run(
        [sys.executable, ROOT / "tests/support/short_of_memory.py", str(800 << 20), "small.yaml",
         *SMALL, "data.scale=0.008", "model.dim=1000"],
        capture_output=True, text=True, cwd=tmp_path, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "rank 0 is out of memory while starting (DefaultCPUAllocator: can't" in done.stderr
    assert "its part of the plan: weights 1." in done.stderr
    assert "Try a smaller model.dim (now 1000), fewer rows of the tables, " in done.stderr
    assert "no checkpoint had been written yet" in done.stderr


def test_a_step_that_gets_no_memory(tmp_path, monkeypatch, capsys):
    overrides = ["train.epochs=2", "checkpoint.every_steps=2", "checkpoint.asynchronous=false"]
    run_small(tmp_path, [*overrides, "run.name=whole"])
    with monkeypatch.context() as patch:
        before_step(patch, 6, out_of_memory)
        assert exit_status(lambda: run_small(tmp_path, overrides)) == 1
    said = capsys.readouterr().err
    assert f"error: rank 0 is out of memory at step 5, between steps ({ON_GPU})" in said
    assert "its part of the plan: weights " in said and " in all" in said
    assert "a smaller train.batch_size (now 256)" in said
    kept = tmp_path / "small/checkpoints/step_00000004"
    assert f"{kept} is kept; checkpoint.resume=auto continues from there" in said
    run_small(tmp_path, [*overrides, "checkpoint.resume=auto"])
    assert without_times(tmp_path / "small") == without_times(tmp_path / "whole")


def test_before_there_is_a_plan(tmp_path, monkeypatch):
    def lacking(*_):
        raise MemoryError

    monkeypatch.setattr("stampede.engine.run.open_dataset", lacking)
    with pytest.raises(
        LackOfMemoryError, match=r"(?s)of memory while starting \(MemoryError\)\n  Try "
    ):
        run_small(tmp_path, [])


def test_the_figures_are_those_of_the_plan(tmp_path, monkeypatch):
    """Those of the tables are what these take when they are there."""
    told = []
    build = building.build

    def noting(*arguments):
        *rest, on_plan = arguments
        return build(*rest, lambda figures: (told.append(figures), on_plan(figures)))

    monkeypatch.setattr("stampede.engine.run.build", noting)
    before_step(monkeypatch, 1, out_of_memory)
    with pytest.raises(LackOfMemoryError) as lack:
        run_small(tmp_path, [])
    (figures,) = told
    total = figures.total_memory[0] / 1e6
    assert total > 1 and f"{total:.2f} MB in all" in str(lack.value)


@pytest.mark.parametrize(
    "failure, said",
    [
        (MemoryError(), "MemoryError"),
        (torch.cuda.OutOfMemoryError(ON_GPU), ON_GPU),
        (RuntimeError(OF_TORCH), OF_TORCH.partition("err == 0. ")[2]),
        (RuntimeError("CUDA error: out of memory\nmore"), "CUDA error: out of memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "[Errno 12] Cannot allocate memory"),
    ],
)
def test_what_is_a_lack_of_memory(capsys, failure, said):
    def fail():
        raise failure

    assert lacks_memory(failure) and what_was_asked(failure) == said
    if not isinstance(failure, OSError):
        assert exit_status(fail) == 1
        assert f"error: out of memory ({said})" in capsys.readouterr().err


def test_what_numpy_and_torch_raise():
    """Of more bytes than there are addresses, so that nothing is allocated."""
    for allocate in (lambda: np.empty(1 << 55), lambda: torch.empty(1 << 56)):
        with pytest.raises((MemoryError, RuntimeError)) as raised:
            allocate()
        assert lacks_memory(raised.value)


@pytest.mark.parametrize(
    "failure", [RuntimeError("a mistake of ours"), OSError(28, "full"), ValueError("out of memory")]
)
def test_what_is_none(failure):
    assert not lacks_memory(failure)


def lower(folder, weights, activations, *overrides, stage="computing", on_gpu=False):
    config = small_config(folder, *overrides)
    zeros = {name: np.zeros(2) for name in MEMORY}
    figures = Figures(zeros, np.zeros(2), {}, np.zeros(2))
    figures.memory["weights"][1], figures.memory["activations"][1] = weights, activations
    return what_to_lower(config, figures, 1, stage, on_gpu)


def test_what_takes_most_is_to_be_lowered_first(tmp_path):
    tables = lower(tmp_path, 2e9, 1e9)
    batches = lower(tmp_path, 1e9, 2e9)
    assert sorted(tables) == sorted(batches)
    assert tables[0] == "a smaller model.dim (now 10)"
    assert batches[0] == "a smaller train.batch_size (now 256)"
    assert "optim.embedding.optimizer=rowwise_adam" in tables


def test_what_is_of_no_use_is_not_proposed(tmp_path):
    tries = lower(tmp_path, 2e9, 1e9, "optim.embedding.optimizer=sgd")
    assert not [line for line in tries if "optimizer" in line or "residence" in line]
    assert lower(tmp_path, 2e9, 1e9, stage="saving")[0].startswith("checkpoint.asynchronous=false")
    tries = lower(tmp_path, 1e9, 2e9, stage="evaluating")
    assert tries[0] == "a smaller evaluate.batch_size (now 128)"
    assert not [line for line in tries if "train.batch_size" in line]


def test_data_on_a_gpu_can_be_elsewhere(tmp_path):
    (tmp_path / "log.yaml").write_text("data: {kind: prepared, path: somewhere}")
    config = load_config(tmp_path / "log.yaml")
    assert what_to_lower(config, None, 0, "computing", True)[-1] == "data.residence=memory"
    assert "residence" not in str(what_to_lower(config, None, 0, "computing", False))
