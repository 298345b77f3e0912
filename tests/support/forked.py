"""Processes forked from one that has imported what takes seconds to import."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from support import forking
from support.forking import server_of_tests

START_METHOD = "forkserver"
FORKED_TORCHRUN = (*forking.PROGRAM, str(Path(__file__).with_name("forking_torchrun.py")))
# Modules are imported there, and nothing is run: threads that a first query of polars or a first
# backward pass starts would be missing in the processes that are forked.
multiprocessing.set_forkserver_preload(
    [
        "pytest",
        "torchrec",
        "torch.distributed.optim",
        "torch.distributed.run",
        "torch.utils.tensorboard",
        "matplotlib.figure",
        "matplotlib.backends.backend_agg",
        "PIL.PngImagePlugin",
        "stampede.engine.run",
        "stampede.engine.results.plots",
        "stampede.models.deepfm",
        "s3fs",
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


def torchrun(
    program: Path,
    arguments: Sequence[object],
    ranks: int,
    restarts: int = 0,
    options: Sequence[str] = ("--standalone",),
    seconds: int | None = 5,
) -> subprocess.Popen[str]:
    """A torchrun that runs a program in workers that are forked: their imports would take longest.

    Args:
        options: of torchrun.
        seconds: that it gives workers to end; None for its own number, 30.
    """
    # torchrun knows no other way in all its versions.
    timeout = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    left_out = ("RANK", "WORLD_SIZE", timeout)
    environment = {key: value for key, value in os.environ.items() if key not in left_out}
    if seconds is not None:
        environment[timeout] = str(seconds)
    environment |= server_of_tests()
    command = [
        *FORKED_TORCHRUN, *options,
        "--nproc_per_node", str(ranks), "--max-restarts", str(restarts),
        str(program), *map(str, arguments),
    ]  # fmt: skip
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2], **streams)


def ended(process: subprocess.Popen[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """What a torchrun has said, and its exit status."""
    with process:
        try:
            output = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            # It ends its workers; a kill would leave them behind.
            process.terminate()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, *output)


def _run(path, arguments, cwd, said):
    for number, file in enumerate(said, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    os.chdir(cwd)
    sys.argv = [str(path), *arguments]
    runpy.run_path(str(path), run_name="__main__")
