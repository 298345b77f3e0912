"""Write synthetic clicks as a log in files whose ids drift: `stampede synthetic FOLDER`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import yaml

from stampede.data.errors import DataError
from stampede.data.exit_status import exit_status
from stampede.settings import counted


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stampede synthetic",
        description="Write synthetic clicks as a log in Criteo's layout, a file for each day. From "
        "day to day some\nids are replaced by new ones. Existing files are kept.",
        epilog="example:\n"
        "  stampede synthetic logs --files 3\n"
        "  stampede incremental configs/criteo_kaggle.yaml data.path='logs/*.tsv' run.name=ads",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folder", metavar="FOLDER", type=Path, help="for day_1.tsv, day_2.tsv, ...")
    add("--files", type=int, default=3, metavar="N", help="days; default 3")
    add("--rows", type=int, default=20_000, metavar="N", help="rows of a file; default 20000")
    drift = "share of the ids that are new each day, in fields of more than 1000; default 0.05"
    add("--drift", type=float, default=0.05, metavar="X", help=drift)
    add("--scale", type=float, default=0.01, help="ids relative to Criteo Kaggle's; default 0.01")
    conversions = "also a second, rarer label, conversion, and schema.yaml with both goals"
    add("--conversions", action="store_true", help=conversions)
    criteo = "instead: train.txt with this share of Criteo Kaggle's rows, and ids as many and as "
    criteo += "frequent as there; 1 is 45.8 million rows, 11 GB"
    add("--criteo", type=float, metavar="SHARE", help=criteo)
    add("--seed", type=int, default=0, help="seed of the hidden model and the rows; default 0")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 2 for a user's mistake."""
    parser = _parser()
    given = parser.parse_args(arguments)

    def run() -> None:
        # torch takes seconds to import.
        from stampede.data.synthetic import (
            CRITEO_ROWS,
            CriteoClicks,
            SyntheticClicks,
            conversions_schema,
            write_criteo_log,
        )

        wrong = min(given.files, given.rows) < 1 or given.drift < 0 or not 0 < given.scale <= 1
        if given.criteo is not None and not 1e-6 <= given.criteo <= 1:
            raise DataError(
                f"found --criteo {given.criteo:g}; write a share of Criteo Kaggle's rows above 0 "
                "and at most 1, such as 0.01"
            )
        if wrong or given.seed < 0:
            raise DataError(
                f"found --files {given.files} --rows {given.rows} --drift {given.drift:g} --scale "
                f"{given.scale:g} --seed {given.seed}; write --files and --rows of 1 or more, "
                "--drift and --seed of 0 or more, and --scale above 0 and at most 1"
            )
        clicks = SyntheticClicks(seed=given.seed, scale=given.scale, conversions=given.conversions)
        names, rows = [f"day_{n + 1}.tsv" for n in range(given.files)], given.rows
        if given.criteo:
            clicks = CriteoClicks(seed=given.seed, conversions=given.conversions)
            names, rows, given.drift = ["train.txt"], round(given.criteo * CRITEO_ROWS), 0.0
        try:
            given.folder.mkdir(parents=True, exist_ok=True)
            if given.conversions:
                text = yaml.safe_dump(conversions_schema(), sort_keys=False)
                (given.folder / "schema.yaml").write_text(text, encoding="utf-8")
            for number, name in enumerate(names):
                path = given.folder / name
                if not path.exists():
                    write_criteo_log(path, rows, clicks, number, given.drift)
        except OSError as failure:
            raise DataError(f"{given.folder}: cannot be written ({failure.strerror})") from None
        print(f"{counted(len(names), 'file')} of {rows:,} rows in {given.folder}")

    return exit_status(run)
