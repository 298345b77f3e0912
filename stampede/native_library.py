"""C++ kernels, compiled once and loaded. Without a compiler, plain PyTorch does their work."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

# Fuse a product and a sum only where the source says so: a formula must give the same bits
# everywhere.
_FLAGS = [
    "-O3",
    "-march=native",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
]
_LOG = logging.getLogger("stampede.native_library")
_switched_off = False


class Library:
    """The operators that C++ files register with torch; the first file's name is the library's."""

    def __init__(self, *sources: Path, headers: Sequence[Path] = ()) -> None:
        self._name, self._sources, self._headers = sources[0].stem, sources, headers

    def available(self) -> bool:
        """Whether the kernels can be used; compiles them at the first call, which takes seconds.

        Without a C++ compiler plain PyTorch does their work, and a warning says so. With
        `STAMPEDE_NATIVE=0` in the environment it does their work without a warning.
        """
        return not _switched_off and self._is_loaded

    def handles(self, tensor: Tensor, *dtypes: torch.dtype) -> bool:
        """Whether the kernels can be used for a tensor of one of these types, or float32."""
        return (
            tensor.dtype in (dtypes or (torch.float32,))
            and tensor.device.type == "cpu"
            and tensor.is_contiguous()
            and self.available()
        )

    @functools.cached_property
    def _is_loaded(self) -> bool:
        if os.environ.get("STAMPEDE_NATIVE", "1") == "0":
            return False
        try:
            torch.ops.load_library(self._built())
        except Exception as failure:  # Training continues, whatever the user's compiler does.
            reason = str(failure).strip().splitlines()
            _LOG.warning(
                "the CPU kernels of %s could not be compiled, so slower plain PyTorch does their "
                "work (%s: %s); a C++17 compiler (g++ or clang++) in PATH is needed",
                self._name,
                type(failure).__name__,
                reason[-1] if reason else "no reason given",
            )
            return False
        return True

    def _built(self) -> str:
        """Path of the library, compiled unless it is in the cache."""
        folder = cache_folder() / f"{self._name}-{_key([*self._sources, *self._headers])}"
        library = folder / f"{self._name}.so"
        if library.exists():
            return str(library)
        folder.mkdir(parents=True, exist_ok=True)
        # One process compiles while the machine's others wait. The system frees this lock if the
        # process is killed. torch's own lock is a file, which would stay and block all later runs.
        with open(folder / "lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                self._compile(folder, library)
        return str(library)

    def _compile(self, folder: Path, library: Path) -> None:
        from torch.utils import cpp_extension

        _LOG.info("compiling the CPU kernels of %s, once; some 10 seconds", self._name)
        build = Path(tempfile.mkdtemp(dir=folder))
        path = os.environ["PATH"]
        try:
            # ninja is beside this Python, whose environment may not be activated.
            os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), path])
            cpp_extension.load(
                library.stem,
                list(map(str, self._sources)),
                extra_cflags=_FLAGS,
                extra_ldflags=["-fopenmp"],
                build_directory=str(build),
                is_python_module=False,
            )
            os.replace(build / library.name, library)
        finally:
            os.environ["PATH"] = path
            shutil.rmtree(build, ignore_errors=True)


def cache_folder() -> Path:
    """Where to keep what was compiled or checked on this machine."""
    if "TORCH_EXTENSIONS_DIR" in os.environ:
        return Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "stampede"
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "stampede" / "native"


@contextmanager
def switched_off() -> Iterator[None]:
    """Inside this context plain PyTorch does the work of all libraries."""
    global _switched_off
    before, _switched_off = _switched_off, True
    try:
        yield
    finally:
        _switched_off = before


def _key(files: Sequence[Path]) -> str:
    """A hash of everything that the compiled code depends on; machines may share a home folder."""
    parts = [*(file.read_text() for file in files), *_FLAGS, torch.__version__, platform.machine()]
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    parts.append(next((line for line in lines if line.startswith(("flags", "Features"))), ""))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
