"""Creates .venv and installs the project into it, once for each state of the requirements."""

from __future__ import annotations

import hashlib
import json
import os
import ssl
import subprocess
import sys
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

STAMP = ".stampede-installed"
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


class SetUpError(Exception):
    """The set-up cannot go on; the message is one sentence for the user."""


@dataclass(frozen=True)
class TorchBuild:
    """The build of torch that pip would install."""

    version: str
    url: str
    nvidia_packages: int  # how many it requires

    @property
    def kind(self) -> str:
        """Say what the build can run on."""
        if "+cpu" in self.version:
            return "CPU build"
        if self.nvidia_packages or "+cu" in self.version:
            return "CUDA build"
        return "build of unknown kind"


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
    if os.access(_python_of(venv), os.X_OK) and stamp.is_file() and stamp.read_text() == wanted:
        return

    stamp.unlink(missing_ok=True)
    _prepare_venv(venv)
    _install(root, venv, gpu)
    unfinished = stamp.with_suffix(".new")
    unfinished.write_text(wanted)
    unfinished.replace(stamp)
    _say("the set-up is done")


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
            _say(f".venv was made with Python {made_with}: making it anew with {_this_python()}")
        elif (_look_into(venv) or {}).get("pip"):
            return
        else:
            _say(".venv does not work or has no pip: making it anew")
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
    _say(f"creating .venv with Python {version}")
    made = subprocess.run(
        [python, "-m", "venv", "--clear", str(venv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if made.returncode:
        if "ensurepip" in made.stdout:
            raise SetUpError(no_pip)
        raise SetUpError(f"could not create .venv: {_last_line(made.stdout)}")


def _install(root: Path, venv: Path, gpu: bool) -> None:
    found = _look_into(venv)
    if found is None or not found["pip"]:
        raise SetUpError(f"{venv} has no pip: remove it and run make again")
    if _leading_numbers(found["pip"]) < PIP_FOR_DRY_RUN:
        _upgrade_pip(venv)

    pinned = _pinned_torch(root)
    installed = found["torch"]
    present = bool(installed) and installed.split("+")[0] == pinned.split("==")[1]
    # A CPU build that was installed before a GPU appeared is not taken as the answer.
    if present and not (gpu and "+cpu" in installed):
        _say(f"torch {installed} is installed already")
        version = installed
    else:
        _say(f"asking pip which build of {pinned} it would install")
        build = _ask_for_build(venv, pinned)
        _tell(build, _size_text(venv, build.url), gpu)
        version = build.version
    # A user with a GPU may still choose the CPU build of torch; FBGEMM has to match it.
    variant = "cuda" if gpu and "+cpu" not in version else "cpu"

    unfit = _unfit(found, variant, version)
    if unfit:
        _say(f"removing the other variant first: {', '.join(unfit)}")
        _pip(venv, root, "uninstall", "--yes", *unfit)
    _say(f"installing install/requirements-{variant}.txt and the project into .venv")
    _pip(venv, root, "install", "-r", f"install/requirements-{variant}.txt", "-e", ".[test]")


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


def _pinned_torch(root: Path) -> str:
    for line in (root / "install" / "requirements-cpu.txt").read_text().splitlines():
        if line.startswith("torch=="):
            return line.strip()
    raise SetUpError("install/requirements-cpu.txt has no line `torch==...`")


def _ask_for_build(venv: Path, pinned: str) -> TorchBuild:
    options = ["--dry-run", "--ignore-installed", "--no-deps", "--no-input", "--quiet"]
    asked = _quiet_pip(venv, "install", *options, "--report", "-", pinned)
    if asked.returncode:
        raise SetUpError(_pip_failure(asked.stderr))
    item = json.loads(asked.stdout)["install"][0]
    requirements = item["metadata"].get("requires_dist", [])
    return TorchBuild(
        version=item["metadata"]["version"],
        url=item["download_info"]["url"],
        nvidia_packages=sum(name.startswith(("nvidia-", "cuda-")) for name in requirements),
    )


def _tell(build: TorchBuild, size: str, gpu: bool) -> None:
    wheel = urllib.parse.unquote(urllib.parse.urlsplit(build.url).path.rsplit("/", 1)[-1])
    _say(f"torch {build.version}, a {build.kind}: {wheel}, {size}")
    if gpu and build.kind == "CPU build":
        _say("this machine has a GPU, but pip's settings choose a CPU build: training runs on CPU")
    if not gpu and build.kind == "CUDA build":
        _say(
            "note: this machine has no NVIDIA GPU, yet pip's settings choose the CUDA build of\n"
            f"  torch. It works, but brings {build.nvidia_packages} more packages of CUDA "
            "libraries: gigabytes to download and to keep.\n"
            "  For the CPU build stop this, let pip's own setting (PIP_EXTRA_INDEX_URL,\n"
            "  PIP_FIND_LINKS or pip.conf) point to where PyTorch publishes its CPU wheels, and\n"
            "  run make again."
        )


def _size_text(venv: Path, url: str) -> str:
    size = _size(venv, url)
    return f"{size / 1e6:,.0f} MB" if size else "size not told by the index"


def _size(venv: Path, url: str) -> int | None:
    parts = urllib.parse.urlsplit(url)
    try:
        if parts.scheme == "file":
            return os.path.getsize(urllib.request.url2pathname(parts.path))
        settings = _pip_settings(venv)
        handlers: list[urllib.request.BaseHandler] = [
            urllib.request.HTTPSHandler(context=_certificates(settings.get("cert")))
        ]
        if settings.get("proxy"):
            proxy = settings["proxy"]
            handlers.append(urllib.request.ProxyHandler({"http": proxy, "https": proxy}))
        question = urllib.request.Request(url, method="HEAD")
        with urllib.request.build_opener(*handlers).open(question, timeout=30) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, ValueError, TypeError):
        return None  # the size is only told to the user: pip may know ways in that this does not


def _certificates(cert: str | None) -> ssl.SSLContext:
    if cert and os.path.isdir(cert):
        return ssl.create_default_context(capath=cert)
    return ssl.create_default_context(cafile=cert)


def _pip_settings(venv: Path) -> dict[str, str]:
    """Return the user's settings of pip; the environment comes last in pip's list and wins."""
    lines = _quiet_pip(venv, "config", "list").stdout.splitlines()
    pairs = sorted((line.split("=", 1) for line in lines if "=" in line), key=_is_environment)
    return {key.rsplit(".", 1)[-1]: value.strip("'\"") for key, value in pairs}


def _is_environment(pair: list[str]) -> bool:
    return pair[0].startswith(":env:")


def _upgrade_pip(venv: Path) -> None:
    oldest = ".".join(map(str, PIP_FOR_DRY_RUN))
    done = _quiet_pip(venv, "install", "--quiet", "--no-input", "--upgrade", f"pip>={oldest}")
    # Any other failure is let pass: the older pip does the work too, only with more downloading.
    if done.returncode and _is_no_connection(done.stderr):
        raise SetUpError(_pip_failure(done.stderr))


def _pip(venv: Path, root: Path, *arguments: str) -> None:
    command = [str(_python_of(venv)), "-m", "pip", *arguments]
    # Only the errors are read here: pip draws its progress bars on a terminal only.
    with subprocess.Popen(
        command, cwd=root, env=_pip_environment(), stderr=subprocess.PIPE, text=True
    ) as running:
        errors = []
        for line in running.stderr or ():
            errors.append(line)
            sys.stderr.write(line)
    if running.returncode:
        raise SetUpError(_pip_failure("".join(errors)))


def _quiet_pip(venv: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(_python_of(venv)), "-m", "pip", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=_pip_environment())


def _pip_environment() -> dict[str, str]:
    # All of the user's settings hold except `user`, with which pip refuses to work in a venv.
    return {**os.environ, "PIP_USER": "0"}


def _is_no_connection(errors: str) -> bool:
    return any(sign in errors for sign in NO_CONNECTION)


def _pip_failure(errors: str) -> str:
    lines = [line for line in errors.splitlines() if line.startswith("ERROR")]
    said = (lines[-1] if lines else _last_line(errors)).removeprefix("ERROR:").strip()
    if _is_no_connection(errors):
        return (
            "pip could not reach its package index: check the network or pip's settings "
            f"(`pip config list`) and run make again (pip said: {said})"
        )
    return f"pip failed, so the set-up is not done: {said}"


def _look_into(venv: Path) -> dict | None:
    try:
        looked = subprocess.run(
            [str(_python_of(venv)), "-c", LOOK_INTO_VENV],
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


def _python_of(venv: Path) -> Path:
    return venv / "bin" / "python"


def _this_python() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def _leading_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def _say(text: str) -> None:
    print(f"setup: {text}", flush=True)
