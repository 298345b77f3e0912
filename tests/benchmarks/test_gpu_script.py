"""`benchmarks/gpu.sh` runs wherever the packages are, here without a GPU."""

import json
import os
import subprocess
import sys

import pytest
import torch

from support.paths import ROOT
from support.waiting import HANG

pytestmark = pytest.mark.slow


# The cases of all parts in one process, without Polars as on the GPU machine. Inductor would write
# code for the CPU, which says nothing about a GPU: the network is only traced.
IN_ONE_PROCESS = """
import gc, importlib, json, sys, torch
sys.modules["polars"] = None
import correctness, run, torch._inductor.compile_fx
from cases import run_cases

torch._inductor.compile_fx.compile_fx = lambda graph, inputs, **options: graph
gc.collect()
gc.freeze()

everything, cpu = {}, torch.device("cpu")
for part, (place, _) in {**run.COMMANDS["first"], **run.COMMANDS["second"]}.items():
    if part != "whole_step_graph":
        module, function = place.split(".")
        cases = getattr(importlib.import_module(module), function)
        for _ in run_cases(cases(cpu, True, None), everything.setdefault(part, {}), cpu):
            pass
json.dump(everything, open(sys.argv[1], "w"))
"""


@pytest.fixture
def environment():
    paths = [ROOT, ROOT / "tests", ROOT / "benchmarks", ROOT / "benchmarks/gpu"]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "STAMPEDE_NATIVE": "0",
        "TRITON_INTERPRET": "1",
    }


@pytest.mark.wide
def test_all_cases_run_on_a_cpu_too(tmp_path, environment):
    out = tmp_path / "gpu.json"
    program = [sys.executable, "-c", IN_ONE_PROCESS, str(out)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text())
    for cases in found.values():
        assert all("error" not in case for case in cases.values()), cases
    assert found["floors"]["copy"]["bytes_per_second"] > 0
    assert len(found["correctness"]) == 18
    kernels = found["correctness"]["kernels: 64 columns, no clip"]["errors"]
    assert len(kernels) == 8 and all(0 <= error < 1e-5 for error in kernels.values())
    runs = found["training"].values()
    assert {(r["precision"], r["rows"]) for r in runs} == {
        (precision, rows) for precision in ("bf16", "tf32") for rows in ("all", "touched")
    }
    # FBGEMM has no Adam on a CPU.
    assert len(runs) == 9 and len(found["yardsticks"]) == 4
    for run in [*runs, *found["yardsticks"].values()]:
        assert run["seconds_for_413_million"] * run["samples_per_second"] == pytest.approx(413e6)
    (profile,) = found["profile"].values()
    assert profile["kernels"][0]["microseconds_a_step"] > 0
    assert [case["compiled_graphs"] for case in found["compiled"].values()] == [1, 1]
    assert len(found["large_batch"]) == 2
    on_device, on_cpu = found["quickstart"].values()
    assert 0.5 < on_device["auc"] == on_cpu["auc"]


PARTS = """
import os, sys, time
from pathlib import Path
import cases, run

def several(device, quick, package):
    yield "right", lambda: {"figure": 1.0}
    yield "wrong", wrong
    yield "dead", dead
    yield "after", lambda: None

def wrong():
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    folder.mkdir()
    (folder / "_replay.ptx").write_text("x" * 9000 + "the end")
    raise ValueError("first line\\nlast line")

def dead():
    cases._is_usable = lambda device: False
    raise RuntimeError("an illegal memory access")

def hangs(device, quick, package):
    yield "sleeps", lambda: time.sleep(1000)

def crashes(device, quick, package):
    yield "aborts", os.abort

run.COMMANDS = {"first": {
    "several": ("parts.several", 300),
    "crashes": ("parts.crashes", 300),
    "hangs": ("parts.hangs", 10),
}}
if __name__ == "__main__":
    sys.exit(run.main())
"""


@pytest.mark.wide
def test_what_fails_is_kept_and_the_rest_goes_on(tmp_path, environment):
    (tmp_path / "parts.py").write_text(PARTS)
    out = tmp_path / "gpu.json"
    # Of an earlier command.
    out.write_text(json.dumps({"second": {"quickstart": "kept"}}))
    done = subprocess.run(
        [sys.executable, tmp_path / "parts.py", "first", "--device", "cpu", "--out", out],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 1
    assert "see what several, crashes, hangs says" in done.stderr
    found = json.loads(out.read_text())
    assert found["second"] == {"quickstart": "kept"}
    several, crashes, hangs = (found["first"][part] for part in ("several", "crashes", "hangs"))
    assert several["cases"]["machine"]["torch"] == torch.__version__
    assert several["cases"]["right"]["figure"] == 1.0
    wrong = several["cases"]["wrong"]
    assert wrong["error"] == "ValueError: first line ... last line"
    assert "in wrong\n" in wrong["traceback"]
    code = wrong["code"]["_replay.ptx"]
    assert code.endswith("the end") and len(code) == 6000
    assert "illegal memory access" in several["cases"]["dead"]["error"]
    # By another process.
    assert "error" not in several["cases"]["after"]
    assert crashes["cases"]["aborts"]["error"] == "it did not end" and crashes["status"] < 0
    assert "Fatal Python error: Aborted" in crashes["errors"]
    assert hangs["stopped"].startswith("after 10 s") and "Timeout" in hangs["errors"]
    assert hangs["cases"]["sleeps"]["error"] == "it did not end"
