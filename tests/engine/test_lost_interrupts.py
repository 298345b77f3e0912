"""Ctrl-C in a finalizer stops a run as it does elsewhere."""

import subprocess
import sys

import pytest

from support.paths import ROOT

IN_A_FINALIZER = """
import signal, sys, time, weakref
from stampede.engine.exit_status import exit_status

signal.signal(signal.SIGINT, signal.default_int_handler)

class Kept:
    pass

def interrupted():
    kept = Kept()
    weakref.finalize(kept, signal.raise_signal, signal.SIGINT)
    del kept
    for _ in range(1000):
        time.sleep(0.01)
    print("not heard")

def failed():
    kept = Kept()
    weakref.finalize(kept, int, "other errors are printed as ever")
    del kept

sys.exit(exit_status({action}))
"""


@pytest.mark.parametrize("action, status", [("interrupted", 130), ("failed", 0)])
def test_an_interrupt_is_not_lost_in_a_finalizer(action, status):
    script = IN_A_FINALIZER.replace("{action}", action)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == status, done.stderr
    assert ("stopped; checkpoint.resume=auto" in done.stdout) == (action == "interrupted")
    assert "not heard" not in done.stdout
    assert ("other errors are printed as ever" in done.stderr) == (action == "failed")
