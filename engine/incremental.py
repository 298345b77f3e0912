"""Train on a log that comes in files: `stampede incremental CONFIG.yaml data.path='logs/*.gz'`.

Each file is scored with the current model, then trained on. Run the command again to train on
new files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from stampede.engine.exit_status import exit_status
from stampede.engine.start_up import before_torch, importing, same_products


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 2 for a user's mistake."""
    before_torch()
    # Overrides may come before or after the options.
    given = _parser().parse_intermixed_args(arguments)

    def train() -> None:
        from stampede.engine.config.load import load_config

        if load_config(Path(given.config), given.overrides).train.reproducible:
            same_products()
        with importing():
            from stampede.engine.periods.loop import train_incrementally

        how = given.on_bad_file, given.follow, given.prepare_only
        train_incrementally(Path(given.config), given.overrides, *how)

    return exit_status(train)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stampede incremental",
        usage="stampede incremental CONFIG.yaml data.path='logs/*.gz' [section.key=value ...]\n"
        "       [--follow | --prepare-only] [--on-bad-file skip]",
        description="Train on a log that comes in files, in the order of names or times. Each\n"
        "is scored with the model so far, then trained on; new ids get rows, weights and\n"
        "moments are kept. Run it again to continue with new files.",
        epilog="results, in the run folder:\n"
        "  metrics.jsonl      a line for each file: AUC and logloss before it was trained on\n"
        "  periods.png        the same as a picture\n"
        "  period_0001, ...   a run folder for each file, for predict and export\n\n"
        "keys that matter here (launch.py --help all): train.replay (while the log has fewer\n"
        "than a million rows, a new model of all files), data.order_by, data.max_rows,\n"
        "data.admission_periods, data.evict, and min_count in the schema; checkpoint.keep: number\n"
        "of periods that keep their checkpoints",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("config", metavar="CONFIG.yaml", help="a job on a raw log")
    add("overrides", nargs="*", default=[], metavar="section.key=value")
    ways = parser.add_mutually_exclusive_group()
    following = "wait for more files; SIGTERM or Ctrl-C ends it"
    ways.add_argument("--follow", action="store_true", help=following)
    preparing = "prepare the next file, such as with data.spark=MASTER, for a later call"
    ways.add_argument("--prepare-only", action="store_true", help=preparing)
    bad = "an unreadable or late file: error (default) stops, skip leaves it out"
    add("--on-bad-file", choices=["error", "skip"], default="error", help=bad)
    return parser


if __name__ == "__main__":
    # It trained, before there was `python -m stampede`.
    sys.exit("error: write -m stampede incremental CONFIG.yaml")
