"""Report on runs: `stampede report runs/...`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from stampede import exit_status, stores


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 2 for a user's mistake."""
    given = _parser().parse_args(arguments)

    def report() -> None:
        # pandas and matplotlib take seconds to import.
        from stampede.lab.report.page import PAGE, write_report
        from stampede.lab.report.records import baseline_of, open_runs

        without = stores.is_checkpoint_data
        runs = open_runs([stores.fetched(path, without=without) for path in given.runs])
        named = given.baseline and str(stores.local(given.baseline))
        baseline = baseline_of(runs, named) if named else None
        with stores.outgoing(given.out, overwrite=True) as out:
            lacking = write_report(runs, out, baseline)
        print(f"  report of {len(runs):,} run{'s' * (len(runs) != 1)}: {given.out}/{PAGE}")
        for sentence in lacking:
            print(f"  {sentence}")

    return exit_status(report)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stampede report",
        description="Write one HTML page on training runs, and its pictures as PNG: learning "
        "curves, AUC against\nbatch size and training time, calibration, clipped rows, times of "
        "steps, results and differences of\nthe configurations. Runs that differ only in run.seed "
        "are averaged; runs on different data get\nseparate pictures. The report names what runs "
        "did not record.",
        epilog="examples:\n"
        "  stampede report runs/quickstart\n"
        "  stampede report runs/criteo-1024 runs/criteo-8192 --out criteo\n"
        "  stampede report runs          all runs in a folder",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    runs = "run folders, folders of run folders, or sweep folders; or their URLs"
    add("runs", nargs="+", metavar="RUN", help=runs)
    baseline = "run that the tables compare the others with; with several seeds, any of them"
    add("--baseline", metavar="RUN", help=baseline)
    out = "folder of the page and the pictures; replaces an earlier report; default: report"
    add("--out", default="report", metavar="FOLDER", help=out)
    return parser
