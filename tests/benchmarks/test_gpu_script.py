"""`benchmarks/gpu.sh` runs wherever the packages are, here without a GPU."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

from support.paths import ROOT
from support.waiting import HANG

pytestmark = pytest.mark.slow


def test_all_parts_run_and_leave_their_results(tmp_path):
    out = tmp_path / "gpu.json"
    # The GPU machine has no Polars.
    (tmp_path / "polars.py").write_text("raise ModuleNotFoundError('no polars here')\n")
    done = subprocess.run(
        ["sh", ROOT / "benchmarks/gpu.sh", "-", "all", out],
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "PYTHONPATH": str(tmp_path),
            "GPU_OPTIONS": "--device cpu --quick",
        },
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text())
    assert len(found["correctness"]) == 13
    assert set(found["correctness"].values()) == {"ok"}
    assert set(found["update"]) == {"256", "512"}
    for update in found["update"].values():
        assert update["fbgemm_forward_seconds"] > 0
        assert update["update_of_fbgemm_adam"].keys() == {"ours_touched", "ours_all"}
        assert all(seconds > 0 for seconds in update["kernel_seconds"].values())
    assert not found["training"]["failed"]
    runs = found["training"]["runs"]
    kinds = {(run["precision"], run["rows"]): run for run in runs if run["compile"] == "none"}
    assert len(kinds) == 4 and [run["compiled_graphs"] for run in runs] == [0, 0, 0, 0, 1]
    for run in runs:
        assert run["samples_per_second"] > 0 < run["distinct_rows_a_step"]
        assert run["share_of_gemm"] > 0 < run["share_of_copy"]
    assert found["profile"][0]["microseconds_a_step"] > 0


@pytest.fixture
def script(tmp_path, monkeypatch, capsys):
    """Runs the parts in this process, with parts that do nothing; its status and complaints."""
    for folder in ("benchmarks", "benchmarks/gpu"):
        monkeypatch.syspath_prepend(ROOT / folder)
    import run

    monkeypatch.setenv("COMMIT", "1234567")
    monkeypatch.setattr(run, "PARTS", {"update": lambda *_: [{"update": 1}], "training": None})
    monkeypatch.setattr(run.correctness, "check", lambda *_: time.sleep(HANG))

    def start(*options, device="cpu"):
        given = ["update", "--out", str(tmp_path / "gpu.json"), "--device", device, "--quick"]
        monkeypatch.setattr(sys, "argv", ["run.py", *given, *options])
        try:
            status = run.main()
        except SystemExit as end:
            status = end.code
        return status, capsys.readouterr().err

    return start


def test_parts_of_several_commands_come_together(tmp_path, script):
    from machine import describe_machine

    out = tmp_path / "gpu.json"
    status, said = script("--checked")
    assert status == 2
    assert f"--checked: {out} has no correctness of this code and machine" in said
    # Whatever it says is taken over, and not looked at again.
    earlier = {"machine": describe_machine(), "quick": True, "correctness": {"all": "ok"}}
    out.write_text(json.dumps({**earlier, "training": "of another command"}))
    assert script("--checked") == (0, "")
    found = json.loads(out.read_text())
    assert found == {**earlier, "training": "of another command", "update": {"update": 1}}
    # A check that does not end takes the place of an earlier one.
    status, said = script("--limit", "1")
    assert status == 1 and "correctness" not in json.loads(out.read_text())
    assert said == "error: correctness: took more than 1 s and was stopped\n"


def test_what_cannot_be_compiled_does_not_stop_the_other_runs(script, monkeypatch):
    import deepfm_training

    kinds = (("bf16", "all", "default"), ("tf32", "all", "none"))
    monkeypatch.setattr(deepfm_training, "KINDS", kinds)

    def refuses(graph, inputs):
        raise RuntimeError("no such graph")

    def compile_network(network, how, device):
        if how != "none":
            network.compile(backend=refuses)

    monkeypatch.setattr("job.compile_network", compile_network)
    for found in deepfm_training.measure(torch.device("cpu"), quick=True):
        last = found
    (failed,) = last["failed"]
    assert failed["compile"] == "default" and "no such graph" in failed["why"]
    assert [run["compile"] for run in last["runs"]] == ["none"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(script):
    status, said = script(device="cuda")
    assert status == 2 and "no GPU here" in said
