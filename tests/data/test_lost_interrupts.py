"""Ctrl-C in a finalizer stops a run, or a command, as it does elsewhere."""

import subprocess
import sys

import pytest

from support.paths import ROOT

IN_A_FINALIZER = """
import signal, sys, time, weakref
from stampede.{module} import exit_status

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

def interrupted_as_it_returns():
    kept = Kept()
    weakref.finalize(kept, signal.raise_signal, signal.SIGINT)

def failed():
    kept = Kept()
    weakref.finalize(kept, int, "other errors are printed as ever")
    del kept

before = sys.unraisablehook
status = exit_status({action})
assert sys.unraisablehook is before
time.sleep(0.2)
sys.exit(status)
"""


@pytest.mark.parametrize(
    "action, status",
    [("interrupted", 130), ("interrupted_as_it_returns", 130), ("failed", 0)],
)
@pytest.mark.parametrize("module", ["engine.exit_status", "data.command"])
def test_an_interrupt_is_not_lost_in_a_finalizer(module, action, status):
    script = IN_A_FINALIZER.replace("{action}", action).replace("{module}", module)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == status, done.stderr
    said = done.stdout + done.stderr
    assert ("stopped; " in said) == (status == 130)
    assert "not heard" not in said and "KeyboardInterrupt" not in said
    assert ("other errors are printed as ever" in said) == (action == "failed")
