"""Freed memory stays with a process that asks for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
if not HUGE.exists() or "[always]" in HUGE.read_text() or not os.confstr("CS_GNU_LIBC_VERSION"):
    pytest.skip("not glibc, or all pages are huge anyway", allow_module_level=True)

# Page faults of a block that is taken again and again.
PROGRAM = """
import resource, sys
from stampede.engine.start_up import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
assert "torch" not in sys.modules
import torch
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use():
    torch.ones(1 << 24)
use()
before = faults()
for _ in range(4):
    use()
print(faults() - before)
"""
# Of 64 MB. Huge ones take 32 faults, where the system has them.
PAGES = (1 << 26) // 4096


def faults_of(how, **environment):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "THP_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.slow
def test_a_block_that_was_freed_needs_no_new_pages():
    assert faults_of("left alone") > 2 * PAGES
    assert faults_of("kept") < PAGES / 2
    # What the environment says stays.
    own = {"MALLOC_MMAP_THRESHOLD_": "65536", "THP_MEM_ALLOC_ENABLE": "0"}
    assert faults_of("kept", **own) > 2 * PAGES


@pytest.mark.slow
def test_the_launcher_keeps_freed_memory():
    program = (
        "import launch, os; launch.main(['absent.yaml']); print(os.environ['THP_MEM_ALLOC_ENABLE'])"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("THP_")}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"
