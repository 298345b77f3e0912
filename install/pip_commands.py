"""Runs the pip of a virtual environment and turns its failures into a sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from messages import SetUpError, last_line

# From this version on, `pip install --dry-run` reads a wheel's metadata without the whole wheel.
PIP_FOR_DRY_RUN = (23, 3)
# What pip says when it could not reach an index; its closing error then is a misleading
# "No matching distribution found".
NO_CONNECTION = (
    "Retrying (",
    "ConnectionError",
    "NewConnection",
    "Could not fetch URL",
    "timed out",
)


def python_of(venv: Path) -> Path:
    """Return the interpreter of `venv`."""
    return venv / "bin" / "python"


def run_pip(venv: Path, root: Path, *arguments: str) -> None:
    """Run pip in `root` before the user's eyes; raises SetUpError if it fails."""
    command = [str(python_of(venv)), "-m", "pip", *arguments]
    # Only the errors are read here: pip draws its progress bars on a terminal only.
    with subprocess.Popen(
        command, cwd=root, env=_pip_environment(), stderr=subprocess.PIPE, text=True
    ) as running:
        errors = []
        for line in running.stderr or ():
            errors.append(line)
            sys.stderr.write(line)
    if running.returncode:
        raise SetUpError(pip_failure("".join(errors)))


def run_quiet_pip(venv: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pip and return what it said, whether or not it failed."""
    command = [str(python_of(venv)), "-m", "pip", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=_pip_environment())


def upgrade_old_pip(venv: Path, version: str) -> None:
    """Upgrade the pip of `venv`, which has this `version`, if it is too old for a dry run."""
    if _leading_numbers(version) >= PIP_FOR_DRY_RUN:
        return
    oldest = ".".join(map(str, PIP_FOR_DRY_RUN))
    done = run_quiet_pip(venv, "install", "--quiet", "--no-input", "--upgrade", f"pip>={oldest}")
    # Any other failure is let pass: the older pip does the work too, only with more downloading.
    if done.returncode and _is_no_connection(done.stderr):
        raise SetUpError(pip_failure(done.stderr))


def pip_settings(venv: Path) -> dict[str, str]:
    """Return the user's settings of pip; the environment comes last in pip's list and wins."""
    lines = run_quiet_pip(venv, "config", "list").stdout.splitlines()
    pairs = sorted((line.split("=", 1) for line in lines if "=" in line), key=_is_environment)
    return {key.rsplit(".", 1)[-1]: value.strip("'\"") for key, value in pairs}


def pip_failure(errors: str) -> str:
    """Return the sentence for a failure in which pip wrote `errors`."""
    lines = [line for line in errors.splitlines() if line.startswith("ERROR")]
    said = (lines[-1] if lines else last_line(errors)).removeprefix("ERROR:").strip()
    if _is_no_connection(errors):
        return (
            "pip could not reach its package index: check the network or pip's settings "
            f"(`pip config list`) and run make again (pip said: {said})"
        )
    return f"pip failed, so the set-up is not done: {said}"


def _is_no_connection(errors: str) -> bool:
    return any(sign in errors for sign in NO_CONNECTION)


def _pip_environment() -> dict[str, str]:
    # All of the user's settings hold except `user`, with which pip refuses to work in a venv.
    return {**os.environ, "PIP_USER": "0"}


def _is_environment(pair: list[str]) -> bool:
    return pair[0].startswith(":env:")


def _leading_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
