"""Creates .venv and installs the project into it, once for each state of the requirements."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from messages import SetUpError, last_line, say
from pip_commands import python_of, run_pip, upgrade_old_pip
from torch_build import ask_for_build, pinned_torch, size_text, tell

STAMP = ".stampede-installed"

LOOK_INTO_VENV = """
import json
from importlib import metadata

def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

found = {name: version(name) for name in ("pip", "torch", "fbgemm-gpu", "fbgemm-gpu-cpu")}
files = metadata.files("fbgemm-gpu") or [] if found["fbgemm-gpu"] else []
found["shim"] = bool(found["fbgemm-gpu"]) and not any(f.parts[0] == "fbgemm_gpu" for f in files)
print(json.dumps(found))
"""


def main(root: str | Path) -> int:
    """Set up `root`/.venv unless that is done; returns the exit status."""
    try:
        set_up(Path(root))
    except SetUpError as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: the set-up was interrupted; the next make starts it again", file=sys.stderr)
        return 130
    return 0


def set_up(root: Path) -> None:
    """Set up `root`/.venv unless its stamp says that nothing has changed since the last time."""
    venv = root / ".venv"
    stamp = venv / STAMP
    gpu = has_gpu()
    wanted = fingerprint(root, gpu)
    if os.access(python_of(venv), os.X_OK) and stamp.is_file() and stamp.read_text() == wanted:
        return

    stamp.unlink(missing_ok=True)
    _prepare_venv(venv)
    _install(root, venv, gpu)
    unfinished = stamp.with_suffix(".new")
    unfinished.write_text(wanted)
    unfinished.replace(stamp)
    say("the set-up is done")


def fingerprint(root: Path, gpu: bool) -> str:
    """Return a hash of everything the installation depends on."""
    digest = hashlib.sha256()
    # The editable install holds the checkout's path, so a moved checkout installs again.
    facts = [str(root), f"Python {_this_python()}", f"GPU {gpu}"]
    files = [
        root / "pyproject.toml",
        *sorted((root / "install").glob("requirements*.txt")),
        root / "install" / "fbgemm-gpu-shim" / "pyproject.toml",
    ]
    for file in files:
        facts += [file.name, hashlib.sha256(file.read_bytes()).hexdigest()]
    digest.update("\n".join(facts).encode())
    return digest.hexdigest()


def has_gpu() -> bool:
    """Say whether the NVIDIA driver lists a GPU."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return "GPU" in listed.stdout


def _prepare_venv(venv: Path) -> None:
    if venv.exists():
        made_with = _python_version_of(venv)
        if made_with is None:
            raise SetUpError(f"{venv} is in the way: it is not a virtual environment; move it")
        if made_with != _this_python():
            say(f".venv was made with Python {made_with}: making it anew with {_this_python()}")
        elif (_look_into(venv) or {}).get("pip"):
            return
        else:
            say(".venv does not work or has no pip: making it anew")
    _create_venv(venv)


def _create_venv(venv: Path) -> None:
    version = _this_python()
    no_pip = (
        f"this Python {version} cannot make a virtual environment with pip: install its venv and "
        f"ensurepip modules (on Debian and Ubuntu the package python{version}-venv) and run make "
        "again"
    )
    # The base interpreter, because the running one may be the .venv that --clear removes.
    python = getattr(sys, "_base_executable", None) or sys.executable
    modules = subprocess.run([python, "-c", "import venv, ensurepip"], capture_output=True)
    if modules.returncode:
        raise SetUpError(no_pip)
    say(f"creating .venv with Python {version}")
    made = subprocess.run(
        [python, "-m", "venv", "--clear", str(venv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if made.returncode:
        if "ensurepip" in made.stdout:
            raise SetUpError(no_pip)
        raise SetUpError(f"could not create .venv: {last_line(made.stdout)}")


def _install(root: Path, venv: Path, gpu: bool) -> None:
    found = _look_into(venv)
    if found is None or not found["pip"]:
        raise SetUpError(f"{venv} has no pip: remove it and run make again")
    upgrade_old_pip(venv, found["pip"])

    pinned = pinned_torch(root)
    installed = found["torch"]
    present = bool(installed) and installed.split("+")[0] == pinned.split("==")[1]
    # A CPU build that was installed before a GPU appeared is not taken as the answer.
    if present and not (gpu and "+cpu" in installed):
        say(f"torch {installed} is installed already")
        version = installed
    else:
        say(f"asking pip which build of {pinned} it would install")
        build = ask_for_build(venv, pinned)
        tell(build, size_text(venv, build.url), gpu)
        version = build.version
    # A user with a GPU may still choose the CPU build of torch; FBGEMM has to match it.
    variant = "cuda" if gpu and "+cpu" not in version else "cpu"

    unfit = _unfit(found, variant, version)
    if unfit:
        say(f"removing the other variant first: {', '.join(unfit)}")
        run_pip(venv, root, "uninstall", "--yes", *unfit)
    say(f"installing install/requirements-{variant}.txt and the project into .venv")
    run_pip(venv, root, "install", "-r", f"install/requirements-{variant}.txt", "-e", ".[test]")


def _unfit(found: dict, variant: str, torch_version: str) -> list[str]:
    """List the installed packages that must go before `variant` is installed.

    The two FBGEMM packages have the same files, so one must be gone before the other comes. pip
    would also take the shim for the real fbgemm-gpu, and a CPU build of torch for any build.
    """
    unfit = []
    if variant == "cuda" and (found["shim"] or found["fbgemm-gpu-cpu"]):
        unfit = [name for name in ("fbgemm-gpu", "fbgemm-gpu-cpu") if found[name]]
    if variant == "cpu" and found["fbgemm-gpu"] and not found["shim"]:
        unfit = [name for name in ("fbgemm-gpu", "fbgemm-gpu-cpu") if found[name]]
    if variant == "cuda" and found["torch"] and found["torch"] != torch_version:
        unfit.append("torch")
    return unfit


def _look_into(venv: Path) -> dict | None:
    try:
        looked = subprocess.run(
            [str(python_of(venv)), "-c", LOOK_INTO_VENV],
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(looked.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _python_version_of(venv: Path) -> str | None:
    try:
        lines = (venv / "pyvenv.cfg").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition("=")
        if key.strip() in ("version", "version_info"):
            return ".".join(value.strip().split(".")[:2])
    return "of unknown version"


def _this_python() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"
