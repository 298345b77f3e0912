"""Runs the parts of `benchmarks/gpu.sh`: correctness, unless checked before, then others.

Started by `benchmarks/gpu.sh`, which sets the paths.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import correctness
import deepfm_training
import table_update
import torch
from machine import describe_machine

PARTS = {
    "update": table_update.measure,
    "training": deepfm_training.measure,
    "profile": deepfm_training.profile,
}

# Seconds of each part; a command on a lent machine may take ten minutes.
LIMIT = 8 * 60


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["correctness", *PARTS, "all"])
    parser.add_argument("--out", type=Path, required=True, help="JSON, written as it grows")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="small sizes; figures mean little")
    parser.add_argument("--limit", type=int, default=LIMIT, help="seconds of each part")
    parser.add_argument(
        "--checked",
        action="store_true",
        help="continue with OUT, which holds the correctness of this code and machine",
    )
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; --device cpu --quick shows that the script works")
    device = torch.device(options.device)
    found = {"machine": _machine(device), "quick": options.quick}
    earlier = _earlier(options.out, found)
    if options.checked and "correctness" not in earlier:
        parser.error(f"--checked: {options.out} has no correctness of this code and machine")
    # Keep parts that were measured earlier.
    found |= earlier
    try:
        if not options.checked:
            found.pop("correctness", None)
            _write(options.out, found)
            with _at_most(options.limit, "correctness"):
                found["correctness"] = correctness.check(device, options.quick)
        wrong = found["correctness"]
        failed = [name for name, what in wrong.items() if what != "ok"]
        if failed:
            for name in PARTS:
                found.pop(name, None)
        _write(options.out, found)
        for name, measure in PARTS.items():
            if options.part in (name, "all") and not failed:
                found.pop(name, None)
                _write(options.out, found)
                with _at_most(options.limit, name):
                    for found[name] in measure(device, options.quick):
                        _write(options.out, found)
    except _TookTooLong as late:
        print(f"error: {late}", file=sys.stderr)
        return 1
    if failed:
        print(f"error: wrong on this machine: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _earlier(out: Path, found: dict) -> dict:
    """Earlier results of the same code on the same machine."""
    if not out.exists():
        return {}
    earlier = json.loads(out.read_text())
    same = all(earlier.get(key) == value for key, value in found.items())
    commit = found["machine"]["commit"]
    is_known = commit and not commit.endswith("-dirty")
    return earlier if same and is_known else {}


class _TookTooLong(BaseException):
    """Not an `Exception`, because parts catch some of these."""


@contextmanager
def _at_most(seconds: int, part: str) -> Iterator[None]:
    """Stop a part that takes too long; its results so far are written."""

    def stop(*_: object) -> None:
        raise _TookTooLong(f"{part}: took more than {seconds} s and was stopped")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def _machine(device: torch.device) -> dict:
    found = describe_machine()
    if device.type == "cuda":
        import triton

        found |= {
            "gpu": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
        }
    return found


def _write(out: Path, found: dict) -> None:
    whole = out.with_suffix(".tmp")
    whole.write_text(json.dumps(found, indent=1) + "\n")
    whole.replace(out)


if __name__ == "__main__":
    sys.exit(main())
