"""Run a sweep: `python -m stampede.engine.sweep SWEEP.yaml [section.key=value ...]`."""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from stampede.engine.start_up import quiet_libraries

quiet_libraries()

from stampede.engine.errors import INTERRUPTED, exit_status  # noqa: E402
from stampede.engine.sweep.run import run_sweep, start_trial  # noqa: E402
from stampede.engine.sweep.spec import SweepSection, load_sweep  # noqa: E402
from stampede.settings import SettingsError, keys_help  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 2 for a user's mistake, 1 if all trials failed."""
    given = _parser().parse_intermixed_args(arguments)
    return exit_status(lambda: _sweep(given))


def _sweep(given: argparse.Namespace) -> None:
    if given.processes < 1:
        raise SettingsError(f"--processes: found {given.processes}; write a number of at least 1")
    sweep = load_sweep(Path(given.sweep), given.overrides, given.small, given.out)
    if given.retry_failed and sweep.study is not None:
        raise SettingsError("--retry-failed is for grids; a study continues with other points")
    start = functools.partial(start_trial, given.processes)
    try:
        files = run_sweep(sweep, start, given.retry_failed)
    except KeyboardInterrupt:
        print("stopped; give the same command to continue", file=sys.stderr)
        sys.exit(INTERRUPTED)
    print((sweep.folder / "results.md").read_text(encoding="utf-8"))
    print(f"results: {', '.join(map(str, files))}")
    print(f"curves of the trials: stampede report {shlex.quote(str(sweep.folder))}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stampede sweep",
        description="Run a grid of trainings, or an Optuna study, then write a table (CSV and\n"
        "Markdown) and pictures. Every trial has its own run folder. The same command continues\n"
        "a sweep that was stopped. A failed trial does not stop a sweep; the table lists it.",
        epilog="\n".join(["keys of a sweep file:", *keys_help(SweepSection, defaults=False)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("sweep", metavar="SWEEP.yaml", help="what to run, see below; shipped: configs/sweeps/")
    changes = "changes the configuration of all trials, such as data.path=train.txt"
    add("overrides", nargs="*", default=[], metavar="section.key=value", help=changes)
    add("--small", action="store_true", help="run the file's small form")
    out = "folder of the results; default runs/NAME, or runs/NAME-small"
    add("--out", type=Path, metavar="FOLDER", help=out)
    processes = "processes of each trial, on this machine; default 1"
    add("--processes", type=int, default=1, metavar="N", help=processes)
    add("--retry-failed", action="store_true", help="run failed trials again")
    return parser


if __name__ == "__main__":
    sys.exit(main())
