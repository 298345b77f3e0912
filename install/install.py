# ruff: noqa: ANN001, ANN002, ANN201, ANN202
"""Set up .venv for this checkout, again whenever the requirements change; `make setup` runs it.

No annotations: on a Python that is too old, the user must see a sentence, not a traceback.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

OLDEST, NEWEST = (3, 10), (3, 13)
VERSION = "{}.{}".format(*sys.version_info)

STAMP = ".stampede-installed"

# What pip says if it cannot reach an index; it then ends with a misleading "No matching
# distribution found".
NO_CONNECTION = ("Retrying (", "ConnectionError", "NewConnection", "Could not fetch URL")

LOOK_INTO_VENV = """
import json, sys
from importlib import metadata

def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

found = {name: version(name) for name in ("pip", "torch", "fbgemm-gpu", "fbgemm-gpu-cpu")}
files = metadata.files("fbgemm-gpu") or [] if found["fbgemm-gpu"] else []
found["python"] = "{}.{}".format(*sys.version_info)
found["shim"] = bool(found["fbgemm-gpu"]) and not any(f.parts[0] == "fbgemm_gpu" for f in files)
print(json.dumps(found))
"""


class SetUpError(Exception):
    """The set-up failed; the message is one sentence for the user."""


def main(root):
    """Set up `root`/.venv unless it is up to date; return the exit status."""
    try:
        if not OLDEST <= sys.version_info[:2] <= NEWEST:
            raise SetUpError(
                f"this is Python {VERSION}, but Python 3.10 to 3.13 is needed: name one, as in "
                "`PYTHON=python3.12 make setup`"
            )
        set_up(Path(root))
    except SetUpError as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    return 0


def set_up(root):
    """Set up `root`/.venv unless its stamp says that nothing has changed."""
    venv = root / ".venv"
    python, stamp = venv / "bin/python", venv / STAMP
    gpu = has_gpu()
    wanted = fingerprint(root, gpu)
    if os.access(python, os.X_OK) and stamp.is_file() and stamp.read_text() == wanted:
        return
    stamp.unlink(missing_ok=True)
    if not _is_usable(venv):
        _create(venv)
    _install(root, python, gpu)
    stamp.write_text(wanted)
    say("the set-up is done")


def fingerprint(root, gpu):
    """Return a hash of everything that the installation depends on."""
    # The editable install contains the checkout's path.
    facts = [str(root), f"Python {VERSION}", f"GPU {gpu}"]
    files = [root / "pyproject.toml", root / "install/fbgemm-gpu-shim/pyproject.toml"]
    files += sorted((root / "install").glob("requirements*.txt"))
    facts += [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def has_gpu():
    """Return whether the NVIDIA driver lists a GPU."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return False
    return listed.returncode == 0 and "GPU" in listed.stdout


def _is_usable(venv):
    """Whether there is a virtual environment of this Python, with pip."""
    if not venv.exists():
        return False
    if not (venv / "pyvenv.cfg").is_file():
        raise SetUpError(f"{venv} exists but is not a virtual environment; move it")
    found = look_into(venv / "bin/python")
    if found.get("python") != VERSION:
        say(f".venv has another Python: creating it again with {VERSION}")
    return found.get("python") == VERSION and bool(found["pip"])


def _create(venv):
    # The base interpreter: the running one may be in the .venv that --clear removes.
    python = getattr(sys, "_base_executable", None) or sys.executable
    say(f"creating .venv with Python {VERSION}")
    made = subprocess.run(
        [python, "-m", "venv", "--clear", str(venv)], capture_output=True, text=True
    )
    if made.returncode:
        said = last_line(made.stdout + made.stderr)
        raise SetUpError(
            f"could not create .venv with pip ({said}): install the venv and ensurepip modules of "
            f"Python {VERSION} (on Debian and Ubuntu the package python{VERSION}-venv) and run "
            "make again"
        )


def _install(root, python, gpu):
    # From this version on, pip's dry run does not download whole wheels.
    _pip(python, root, "install", "--quiet", "--no-input", "--upgrade", "pip>=23.3")
    found = look_into(python)
    lines = (root / "install/requirements-cpu.txt").read_text().splitlines()
    pinned = next(line.strip() for line in lines if line.startswith("torch=="))
    torch = found.get("torch")
    # A CPU build may be older than the machine's GPU.
    present = torch and torch.split("+")[0] == pinned.split("==")[1]
    if not present or (gpu and "+cpu" in torch):
        torch = _asked_for(python, root, pinned, gpu)
    # With a GPU, pip's settings may still choose a CPU build; FBGEMM must match it.
    variant = "cuda" if gpu and "+cpu" not in torch else "cpu"
    unfit = unfit_packages(found, variant, torch)
    if unfit:
        say(f"removing the other variant first: {', '.join(unfit)}")
        _pip(python, root, "uninstall", "--yes", *unfit)
    say(f"installing install/requirements-{variant}.txt and the project into .venv")
    _pip(python, root, "install", "-r", f"install/requirements-{variant}.txt", "-e", ".[test]")


def _asked_for(python, root, pinned, gpu):
    """The version of torch that pip would install; tells the user which build it is."""
    say(f"asking pip which build of {pinned} it would install")
    options = ["--dry-run", "--ignore-installed", "--no-deps", "--no-input", "--quiet"]
    report = _pip(python, root, "install", *options, "--report", "-", pinned, quiet=True)
    version = json.loads(report)["install"][0]["metadata"]["version"]
    say(f"torch {version}")
    if gpu and "+cpu" in version:
        say("this machine has a GPU, but pip's settings choose a CPU build: training runs on CPU")
    if not gpu and "+cpu" not in version:
        say(
            "note: this machine has no NVIDIA GPU, but pip's settings may choose the CUDA build\n"
            "  of torch. It works, but downloads gigabytes. For the CPU build stop this, point\n"
            "  pip (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS or pip.conf) to PyTorch's CPU wheels, and\n"
            "  run make again."
        )
    return version


def unfit_packages(found, variant, torch):
    """List the installed packages to remove before installing `variant`.

    The two FBGEMM packages have the same files, so remove one before installing the other.
    pip cannot tell the shim from the real fbgemm-gpu, or a CPU build of torch from a CUDA build.
    """
    unfit = []
    other = found["shim"] or found["fbgemm-gpu-cpu"]
    if variant == "cpu":
        other = found["fbgemm-gpu"] and not found["shim"]
    if other:
        unfit = [name for name in ("fbgemm-gpu", "fbgemm-gpu-cpu") if found[name]]
    if variant == "cuda" and found["torch"] and found["torch"] != torch:
        unfit.append("torch")
    return unfit


def look_into(python):
    """Versions of `python` and its packages, None if absent; empty if it does not run."""
    try:
        looked = subprocess.run([str(python), "-c", LOOK_INTO_VENV], capture_output=True, text=True)
        return json.loads(looked.stdout)
    except (OSError, ValueError):
        return {}


def _pip(python, root, *arguments, quiet=False):
    """Run pip and show or return its output; raises SetUpError if it fails."""
    # Overrides only the user's setting `user`, which makes pip refuse to work in a venv.
    environment = {**os.environ, "PIP_USER": "0"}
    done = subprocess.run(
        [str(python), "-m", "pip", *arguments],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode == 0:
        return done.stdout
    sys.stderr.write(done.stderr)
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    said = (lines[-1] if lines else last_line(done.stderr)).replace("ERROR:", "").strip()
    if any(sign in done.stderr for sign in NO_CONNECTION):
        raise SetUpError(
            "pip could not reach its package index: check the network or pip's settings "
            f"(`pip config list`) and run make again (pip said: {said})"
        )
    raise SetUpError(f"pip failed: {said}; read its output above and run make again")


def say(text):
    """Print a line of the set-up."""
    print(f"setup: {text}", flush=True)


def last_line(text):
    """Return the last line of a program's output."""
    return (text.strip().splitlines() or ["no message"])[-1]


if __name__ == "__main__":
    sys.exit(main(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
