"""The compiler takes the kernels, and rounds as `stampede.optim.triton.adam` says."""

import json
import os
import subprocess
import sys

import pytest

from support.paths import ROOT

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """How often instructions occur in each kernel; compiling needs no GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "support.compile_kernels"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_all_kernels_compile(code):
    assert len(code) == 10


def test_nothing_is_approximate(code):
    for name, words in code.items():
        assert words["approx"] == words["div.full"] == words[".ftz"] == 0, name


def test_a_step_has_the_same_instructions_everywhere(code):
    """Of each element: three fused additions, a root and a quotient."""
    for name in ("update False", "replay True", "replay False"):
        words = code[name]
        assert words["fma.rn.f32"] == 3 * words["div.rn.f32"] > 0, name
        assert words["sqrt.rn.f32"] == words["div.rn.f32"], name
