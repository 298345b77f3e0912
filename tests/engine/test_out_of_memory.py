"""Memory that runs out is said in a sentence."""

import errno
import os
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch

from stampede.engine.errors import exit_status, lacks_memory, what_was_asked
from support.jobs import SMALL
from support.paths import ROOT
from support.waiting import HANG

ON_GPU = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 1.10 GiB is free."
)
OF_TORCH = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 5536481280 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.slow
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
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "[Errno 12] Cannot allocate memory"),
    ],
)
def test_errors_that_mean_a_lack_of_memory(capsys, failure, said):
    assert lacks_memory(failure) and what_was_asked(failure) == said
    assert exit_status(mock.Mock(side_effect=failure)) == 1
    printed = capsys.readouterr().err
    assert f"error: out of memory ({said}); try a smaller train.batch_size, " in printed
    assert "checkpoint.resume=auto continues from the newest checkpoint" in printed


def test_allocation_errors_of_numpy_and_torch():
    """Of more bytes than there are addresses, so that nothing is allocated."""
    for allocate in (lambda: np.empty(1 << 55), lambda: torch.empty(1 << 56)):
        with pytest.raises((MemoryError, RuntimeError)) as raised:
            allocate()
        assert lacks_memory(raised.value)


def test_other_errors_do_not_mean_a_lack_of_memory():
    for failure in (RuntimeError("a mistake of ours"), OSError(28, "full"), ValueError("memory")):
        assert not lacks_memory(failure)
