"""The kernels as they are compiled for processors without AVX-512 and AMX."""

import os
import platform
import subprocess
import sys

import pytest

from support.paths import ROOT

PROGRAM = """
import sys
import pytest
from stampede import native_library
native_library._FLAGS.append("-mno-avx512f")
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-n", "0", "-m", "", *sys.argv[1:]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="a processor that has them never")
def test_they_pass_the_same_tests():
    # Those of the sources that ask for the instructions: waiting_rows.cpp, lanes.h, products.cpp.
    tests = (
        "tests/optim/test_cpu_kernels.py::test_the_number_of_threads_changes_no_bit_of_a_replay",
        "tests/optim/test_cpu_kernels.py::test_replays_steps",
        "tests/models/cpu/test_products.py",
        "tests/models/cpu/test_dense_layers.py::test_relu_layers",
        "tests/models/cpu/test_orders.py::test_against_float64",
    )
    # Not what the test run that this one is part of was told.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *tests],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
