"""Runs the cases of a part one after the other and keeps what went wrong in detail."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

# A case's name and what runs it: figures by name, `error` among them if it is wrong.
Case = tuple[str, Callable[[], dict[str, Any] | None]]

# Characters kept of a traceback, and of each file that a compiler wrote.
_MOST_TRACEBACK, _MOST_CODE = 8000, 6000
DID_NOT_END = "it did not end"


class UnusableDeviceError(Exception):
    """After a failure nothing runs on the device; another process must go on."""


def run_cases(cases: Iterable[Case], found: dict[str, Any], device: torch.device) -> Iterator[None]:
    """Run cases that `found` does not hold yet; yields when something was added to it.

    Raises:
        UnusableDeviceError: the process cannot use the device any more.
    """
    for name, call in cases:
        if name in found:
            continue
        found[name] = {"error": DID_NOT_END}
        yield
        began, start = time.time(), time.perf_counter()
        try:
            result = call() or {}
        except Exception as failure:
            result = kept_of(failure, began)
        found[name] = {"case_seconds": round(time.perf_counter() - start, 2), **result}
        print(f"{name}: {_shown(found[name])}", flush=True)
        yield
        if "error" in result and not _is_usable(device):
            raise UnusableDeviceError


def kept_of(failure: Exception, began: float) -> dict[str, Any]:
    """What is needed to mend a failure without the device; code that was compiled since `began`."""
    lines = str(failure).strip().splitlines() or [""]
    error = f"{type(failure).__name__}: {lines[0][:300]}"
    if len(lines) > 1:
        error += f" ... {lines[-1].strip()[:300]}"
    written = "".join(traceback.format_exception(failure))
    return {"error": error, "traceback": written[-_MOST_TRACEBACK:], "code": code_since(began)}


def code_since(began: float, named: str = "") -> dict[str, str]:
    """The ends of the newest files of each kind that Triton and torch.compile wrote.

    Args:
        named: part of the names of the files.
    """
    kinds = {"TRITON_CACHE_DIR": ("ttir", "ttgir", "ptx"), "TORCHINDUCTOR_CACHE_DIR": ("py",)}
    code = {}
    for variable, endings in kinds.items():
        folder = os.environ.get(variable)
        for ending in endings if folder else ():
            files = [
                (file.stat().st_mtime, file)
                for file in Path(folder).rglob(f"*.{ending}")
                if named in file.name and file.stat().st_mtime >= began - 1
            ]
            if files:
                newest = max(files)[1]
                code[newest.name] = newest.read_text(errors="replace")[-_MOST_CODE:]
    return code


def _is_usable(device: torch.device) -> bool:
    try:
        return torch.ones(1, device=device).item() == 1
    except Exception:  # After an invalid access every call fails, with errors of several types.
        return False


def _shown(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"ERROR {result['error']}"
    shown = []
    for name, value in result.items():
        if isinstance(value, float):
            shown.append(f"{name} {value:,.4g}")
        elif isinstance(value, int | str):
            shown.append(f"{name} {value}")
    return ", ".join(shown)
