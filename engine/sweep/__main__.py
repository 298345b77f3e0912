"""Run a sweep: `python -m stampede.engine.sweep SWEEP.yaml [section.key=value ...]`."""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from stampede.engine.start_up import quiet_libraries

quiet_libraries()

from stampede.engine.errors import INTERRUPTED, exit_status  # noqa: E402
from stampede.engine.sweep.run import run_sweep, start_trial  # noqa: E402
from stampede.engine.sweep.spec import SweepSection, load_sweep  # noqa: E402
from stampede.settings import SettingsError, all_keys  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 2 for a user's mistake, 1 if all trials failed."""
    given = _parser().parse_intermixed_args(arguments)
    return exit_status(lambda: _sweep(given))


def _sweep(given: argparse.Namespace) -> None:
    if given.processes < 1:
        raise SettingsError(f"--processes: found {given.processes}; write a number of at least 1")
    sweep = load_sweep(Path(given.sweep), given.overrides, given.small, given.out)
    if given.retry_failed and sweep.study is not None:
        raise SettingsError("--retry-failed is for grids; a study goes on with other points")
    try:
        files = run_sweep(
            sweep, functools.partial(start_trial, given.processes), given.retry_failed
        )
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        sys.exit(INTERRUPTED)
    print((sweep.folder / "results.md").read_text(encoding="utf-8"))
    print(f"results: {', '.join(map(str, files))}")
    print(f"curves of the trials: stampede report {shlex.quote(str(sweep.folder))}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stampede sweep",
        description="Run a grid of trainings, or an Optuna study, then write one table (CSV,\n"
        "Markdown) and pictures. Every trial is a run folder of its own. The same command\n"
        "continues a sweep that was stopped; a trial that failed is listed, not fatal.",
        epilog=_keys(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("sweep", metavar="SWEEP.yaml", help="what to run, see below; shipped: configs/sweeps/")
    add(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="of the configuration, for all trials, such as data.path=train.txt",
    )
    add("--small", action="store_true", help="the file's small form")
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="for the results; default runs/NAME, or runs/NAME-small",
    )
    add(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="of every trial, on this machine; default 1",
    )
    add("--retry-failed", action="store_true", help="run trials that failed before again")
    return parser


def _keys() -> str:
    lines = ["keys of a sweep file:"]
    for key in all_keys(SweepSection):
        indent = " " * 6
        lines.append(f"  {key.path}")
        lines += textwrap.wrap(key.description, 92, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
