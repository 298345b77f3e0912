"""Processes forked from one that has imported what takes seconds to import."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

START_METHOD = "forkserver"
# Modules are imported there, and nothing is run: threads that a first query of polars or a first
# backward pass starts would be missing in the processes that are forked.
multiprocessing.set_forkserver_preload(
    [
        "pytest",
        "torchrec",
        "torch.distributed.optim",
        "torch.utils.tensorboard",
        "matplotlib.figure",
        "matplotlib.backends.backend_agg",
        "PIL.PngImagePlugin",
        "stampede.engine.run",
        "stampede.engine.report",
        "stampede.models.deepfm",
    ]
)


def run_program(
    path: Path, arguments: Sequence[str], cwd: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """What `python path *arguments` in a folder says, and its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / name for name in ("stdout", "stderr")]
        process = multiprocessing.get_context(START_METHOD).Process(
            target=_run, args=(path, list(arguments), cwd, said)
        )
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired([str(path), *arguments], timeout)
        output = [file.read_text() for file in said]
    return subprocess.CompletedProcess([str(path), *arguments], process.exitcode, *output)


def _run(path, arguments, cwd, said):
    for number, file in enumerate(said, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    os.chdir(cwd)
    sys.argv = [str(path), *arguments]
    runpy.run_path(str(path), run_name="__main__")
