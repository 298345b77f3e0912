"""`benchmarks/gpu.sh` runs wherever the packages are, here without a GPU."""

import json
import os
import subprocess
import sys

import pytest
import torch

from support.paths import ROOT


def run_script(out, *options):
    return subprocess.run(
        ["sh", ROOT / "benchmarks/gpu.sh", "-", "all", out],
        env={**os.environ, "PYTHON": sys.executable, "GPU_OPTIONS": " ".join(options)},
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_all_parts_run_and_leave_their_results(tmp_path):
    out = tmp_path / "gpu.json"
    done = run_script(out, "--device", "cpu", "--quick")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text())
    assert len(found["correctness"]) == 13
    assert set(found["correctness"].values()) == {"ok"}
    assert set(found["update"]) == {"256", "512"}
    runs = found["training"]["runs"]
    assert {(run["precision"], run["rows"], run["compile"]) for run in runs} == {
        ("bf16", "all", "default"),
        *(
            (precision, rows, "none")
            for precision in ("tf32", "bf16")
            for rows in ("all", "touched")
        ),
    }
    assert not found["training"]["failed"]
    assert all(run["samples_per_second"] > 0 < run["distinct_rows_a_step"] for run in runs)
    assert found["profile"][0]["microseconds_a_step"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path):
    done = run_script(tmp_path / "gpu.json")
    assert done.returncode == 2
    assert "no GPU here" in done.stderr and "Traceback" not in done.stderr
