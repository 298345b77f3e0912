"""Runs the parts of `benchmarks/gpu.sh first` or `second`, each in a process with a time limit.

Started by `benchmarks/gpu.sh`, which sets the paths.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# By command: its parts in their order, the module and function with their cases, and the most
# seconds they may take. The start of a process is part of it.
COMMANDS = {
    "first": {
        "floors": ("speed.floors", 20),
        "correctness": ("correctness.cases", 90),
        "training": ("speed.training", 90),
        "yardsticks": ("speed.yardsticks", 60),
        "profile": ("speed.profile", 30),
    },
    "second": {
        "whole_step_graph": ("speed.whole_step_graph", 60),
        "compiled": ("speed.compiled", 120),
        "large_batch": ("speed.large_batch", 60),
        "quickstart": ("quickstart.cases", 120),
        # What was mended since the first command.
        "correctness": ("correctness.cases", 90),
    },
}
# Of a command, unpacking included; that on a lent machine ends after ten minutes.
LIMITS = {"first": 295, "second": 560}
# Status of a part's process whose device became unusable: another one does the other cases.
GO_ON = 75
_MOST_ERRORS = 8000
# A part writes where it hangs so long before its limit.
_BEFORE_THE_LIMIT = 2


def main() -> int:
    options = _options()
    if options.part:
        return _run_part(options)
    out, command = options.out, options.command
    began = options.began or time.time()
    found = json.loads(out.read_text()) if out.exists() else {}
    ours = found[command] = {"device": options.device, "quick": options.quick}
    _write(out, found)
    with tempfile.TemporaryDirectory() as scratch:
        # Code that is compiled here is kept only with an error.
        for compiler in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            os.environ[compiler] = str(Path(scratch) / compiler)
        # Compiling the CPU's kernels would take time from the GPU.
        os.environ.setdefault("STAMPEDE_NATIVE", "0")
        if options.device == "cpu":
            os.environ.setdefault("TRITON_INTERPRET", "1")
        for part, (_, limit) in COMMANDS[command].items():
            if options.only and part not in options.only:
                continue
            until = time.time() + limit * options.slower
            until = min(until, began + LIMITS[command] * options.slower)
            print(f"--- {part}, at most {until - time.time():.0f} s", flush=True)
            ours[part] = {}
            for state in _watched(part, options, until, Path(scratch)):
                ours[part] = state
                _write(out, found)
    ours["seconds"] = round(time.time() - began, 1)
    _write(out, found)
    failed = [part for part in COMMANDS[command] if _has_failed(ours.get(part, {}))]
    print(f"{command}: {ours['seconds']:.0f} s, results in {out}", flush=True)
    if failed:
        print(f"error: see what {', '.join(failed)} says in {out}", file=sys.stderr)
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--out", type=Path, required=True, help="JSON, written as it grows")
    parser.add_argument("--package", type=Path, help="folder of golden/, see the README")
    parser.add_argument("--began", type=float, help="when the command began, in seconds of time()")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="small sizes; figures mean little")
    parser.add_argument("--slower", type=float, default=1.0, help="factor of all time limits")
    parser.add_argument("--only", nargs="*", help="these parts of the command")
    # Of the process of one part.
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def _watched(
    part: str, options: argparse.Namespace, until: float, scratch: Path
) -> Iterator[dict[str, Any]]:
    """Run a part in a process of its own; yields what it has found whenever that has grown."""
    file, errors = scratch / f"{part}.json", scratch / f"{part}.log"
    state: dict[str, Any] = {"cases": {}}
    start, status = time.time(), GO_ON
    while status == GO_ON and time.time() < until:
        command = [sys.executable, *sys.argv, "--part", part, "--until", str(until)]
        command[command.index("--out") + 1] = str(file)
        with errors.open("w") as log:
            # It may start processes that hang, too.
            process = subprocess.Popen(command, stderr=log, start_new_session=True)
            try:
                while process.poll() is None and time.time() < until:
                    time.sleep(0.2)
                    if _read(file) != state["cases"]:
                        state["cases"] = _read(file)
                        yield state
            finally:
                if process.poll() is None:
                    state["stopped"] = f"after {time.time() - start:.0f} s"
                    os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
    if status == GO_ON and time.time() >= until and "stopped" not in state:
        state["stopped"] = "no time was left"
    if status != 0:
        state["status"] = status
        if errors.exists():
            state["errors"] = errors.read_text(errors="replace")[-_MOST_ERRORS:]
            print(state["errors"][-2000:], file=sys.stderr)
    state["cases"], state["seconds"] = _read(file), round(time.time() - start, 1)
    yield state


def _has_failed(state: dict[str, Any]) -> bool:
    cases = state.get("cases", {}).values()
    return "status" in state or "stopped" in state or any("error" in case for case in cases)


def _run_part(options: argparse.Namespace) -> int:
    """The process of a part."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(options.until - time.time() - _BEFORE_THE_LIMIT, 0.1))
    import torch
    from cases import UnusableDeviceError, run_cases

    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU here; --device cpu --quick shows that the script works")
    device = torch.device(options.device)
    found = _read(options.out)
    if "machine" not in found:
        found["machine"] = _machine(device)
    module, function = COMMANDS[options.command][options.part][0].split(".")
    cases = getattr(importlib.import_module(module), function)
    try:
        for _ in run_cases(cases(device, options.quick, options.package), found, device):
            _write(options.out, found)
    except UnusableDeviceError:
        return GO_ON
    finally:
        faulthandler.cancel_dump_traceback_later()
    return 0


def _machine(device: Any) -> dict[str, Any]:
    import torch
    from machine import describe_machine

    found = describe_machine()
    if device.type == "cuda":
        import triton

        found |= {
            "gpu": torch.cuda.get_device_name(),
            "gpu_memory_bytes": torch.cuda.get_device_properties(device).total_memory,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
        }
    return found


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def _write(out: Path, found: dict) -> None:
    whole = out.with_suffix(".tmp")
    whole.write_text(json.dumps(found, indent=1) + "\n")
    whole.replace(out)


if __name__ == "__main__":
    sys.exit(main())
