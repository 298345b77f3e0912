"""Which build of torch pip would install, how large it is, and what the user is told of it."""

from __future__ import annotations

import json
import os
import ssl
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from messages import SetUpError, say
from pip_commands import pip_failure, pip_settings, run_quiet_pip


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


def pinned_torch(root: Path) -> str:
    """Return the requirement `torch==...` that both variants share."""
    for line in (root / "install" / "requirements-cpu.txt").read_text().splitlines():
        if line.startswith("torch=="):
            return line.strip()
    raise SetUpError("install/requirements-cpu.txt has no line `torch==...`")


def ask_for_build(venv: Path, pinned: str) -> TorchBuild:
    """Ask the pip of `venv` which build it would install for `pinned`."""
    options = ["--dry-run", "--ignore-installed", "--no-deps", "--no-input", "--quiet"]
    asked = run_quiet_pip(venv, "install", *options, "--report", "-", pinned)
    if asked.returncode:
        raise SetUpError(pip_failure(asked.stderr))
    item = json.loads(asked.stdout)["install"][0]
    requirements = item["metadata"].get("requires_dist", [])
    return TorchBuild(
        version=item["metadata"]["version"],
        url=item["download_info"]["url"],
        nvidia_packages=sum(name.startswith(("nvidia-", "cuda-")) for name in requirements),
    )


def tell(build: TorchBuild, size: str, gpu: bool) -> None:
    """Tell the user which build comes, and whether it fits this machine."""
    wheel = urllib.parse.unquote(urllib.parse.urlsplit(build.url).path.rsplit("/", 1)[-1])
    say(f"torch {build.version}, a {build.kind}: {wheel}, {size}")
    if gpu and build.kind == "CPU build":
        say("this machine has a GPU, but pip's settings choose a CPU build: training runs on CPU")
    if not gpu and build.kind == "CUDA build":
        say(
            "note: this machine has no NVIDIA GPU, yet pip's settings choose the CUDA build of\n"
            f"  torch. It works, but brings {build.nvidia_packages} more packages of CUDA "
            "libraries: gigabytes to download and to keep.\n"
            "  For the CPU build stop this, let pip's own setting (PIP_EXTRA_INDEX_URL,\n"
            "  PIP_FIND_LINKS or pip.conf) point to where PyTorch publishes its CPU wheels, and\n"
            "  run make again."
        )


def size_text(venv: Path, url: str) -> str:
    """Return the size of the wheel at `url` in words."""
    size = _size(venv, url)
    return f"{size / 1e6:,.0f} MB" if size else "size not told by the index"


def _size(venv: Path, url: str) -> int | None:
    parts = urllib.parse.urlsplit(url)
    try:
        if parts.scheme == "file":
            return os.path.getsize(urllib.request.url2pathname(parts.path))
        settings = pip_settings(venv)
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
