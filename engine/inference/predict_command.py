"""Score rows: `stampede predict CHECKPOINT INPUT... OUTPUT`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import get_args

from stampede import stores
from stampede.data.exit_status import exit_status
from stampede.data.options import OnBadRow
from stampede.data.prepared.manifest import PARTS
from stampede.engine.console import readable_metric, table
from stampede.engine.errors import RunFolderError
from stampede.engine.inference.options import (
    OWN_DATA,
    OnBadValue,
    PredictionOptions,
    add_checkpoint_arguments,
    check_exists,
)
from stampede.engine.start_up import importing


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 2 for a user's mistake."""
    parser = _parser()
    given = parser.parse_intermixed_args(arguments)
    if given.batch_size < 1:
        parser.error(f"--batch-size: found {given.batch_size}; write a number of at least 1")
    return exit_status(lambda: _predict(given), RunFolderError)


def _predict(given: argparse.Namespace) -> None:
    check_exists(given.checkpoint)
    with importing():
        from stampede.engine.inference.prediction import predict
        from stampede.engine.inference.trained import open_trained

    trained = open_trained(given.checkpoint, given.epoch, allow_import=given.allow_import)
    options = PredictionOptions(
        **{field.name: getattr(given, field.name) for field in fields(PredictionOptions)}
    )
    with stores.outgoing(given.output, given.overwrite) as output:
        done = predict(trained, given.inputs, output, options)
        aside = str(done.bad_rows_file)
        if stores.is_url(given.output):
            # While no other process may write the scores.
            aside = f"{given.output.rpartition('.')[0]}.bad_rows.jsonl"
            stores.published(aside)
            if given.overwrite and not done.bad_rows and stores.exists(aside):
                stores.delete_object(aside)
    rate = done.rows / max(done.seconds, 1e-9)
    rows = [
        ("scores", given.output),
        ("model", f"{trained.run}, epoch {trained.epoch}"),
        ("rows", f"{done.rows:,}, {rate:,.0f} rows/s"),
    ]
    if done.bad_rows:
        rows.append(("bad rows", f"{done.bad_rows:,} left out, see {aside}"))
    if done.bad_values:
        told = ", ".join(f"{column} {count:,}" for column, count in done.bad_values.items())
        rows.append(("bad values", f"treated as missing: {told}"))
    if done.unknown is not None:
        rows += done.unknown.lines.items()
    if done.metrics and done.metrics_uncorrected:
        rows.append(("metrics", "before the correction for train.negative_rate"))
    if done.metrics:
        for goal, found in done.metrics.get("goals", {"": done.metrics}).items():
            of_goal, logloss = f" of {goal}" * bool(goal), found["logloss"]
            rows.append((f"AUC{of_goal}", readable_metric(found["auc"])))
            # NaN if all weights are 0.
            undefined = math.isnan(logloss)
            rows.append((f"logloss{of_goal}", "undefined" if undefined else f"{logloss:.4f}"))
            calibration = readable_metric(found["calibration"])
            if found["calibration"] is not None:
                calibration += ", the mean score divided by the share of clicks"
            rows.append((f"calibration{of_goal}", calibration))
    print(table(rows))
    for sentence in done.unknown.warnings if done.unknown is not None else ():
        print(f"warning: {sentence}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stampede predict",
        description="Score rows with a trained model, in their order. The output has the "
        "columns\n  file    name of the input file, if there are files\n  row     number of "
        "the row in its file, or in its part, from 0; rows that are left out\n          are "
        "counted too, so you can match scores to rows\n  score   probability of a click; "
        "with several goals, score_GOAL of each\n  label, weight if the input has them; with "
        "several goals, label_GOAL of each",
        epilog="example:\n  stampede predict runs/criteo 'day_*.gz' scores.parquet",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_checkpoint_arguments(parser)
    add = parser.add_argument
    add(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="raw files like those the run was trained on (csv, tsv, parquet; .gz, .zst; globs), "
        f"with or without label; or a prepared folder; or {OWN_DATA}, the run's own data",
    )
    add("output", metavar="OUTPUT", help="file for the scores, NAME.parquet or NAME.csv")
    help = f"part of a prepared folder or of {OWN_DATA}; default test"
    add("--part", choices=PARTS, help=help)
    add(
        "--on-bad-row",
        choices=get_args(OnBadRow),
        default="error",
        help="a row that cannot be read: error (default), or skip: left out and written aside",
    )
    add(
        "--on-bad-value",
        choices=get_args(OnBadValue),
        default="error",
        help="a number, id or time that cannot be used: error (default) makes its row a bad one; "
        "missing treats the value as missing and scores the row",
    )
    add("--ignore-label", action="store_true", help="ignore label and weight columns")
    add("--batch-size", type=int, default=8192, metavar="N", help="samples at a time; 8192")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default auto")
    add("--overwrite", action="store_true", help="replace an existing OUTPUT")
    return parser
