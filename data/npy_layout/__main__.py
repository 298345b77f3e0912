"""`python -m stampede.data.npy_layout export PREPARED OUT` and `... import FOLDER OUT`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from stampede.data.command import exit_status
from stampede.data.npy_layout import export, import_npy
from stampede.data.prepared.manifest import PARTS, read_manifest


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert a folder; returns the exit status: 2 for a user's mistake."""
    options = _parser().parse_args(arguments)
    return exit_status(lambda: _convert(options))


def _convert(options: argparse.Namespace) -> None:
    if options.command == "export":
        export(options.folder, options.out)
        prepared = options.folder
    else:
        import_npy(
            options.folder,
            options.out,
            sizes=options.sizes,
            modulo=options.modulo,
            link=options.link,
        )
        prepared = options.out
    manifest = read_manifest(prepared)
    rows = ", ".join(f"{part} {manifest.rows(part):,}" for part in PARTS)
    tables = sum(entry.rows for entry in manifest.fields)
    print(f"{options.out}: {rows} rows; {len(manifest.fields)} tables of {tables:,} rows together")


def _sizes(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"found {text!r}; write a whole number, or one per field with commas between"
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m stampede.data.npy_layout",
        description="Prepared data to and from the layout of TorchRec's and MLPerf's Criteo "
        "readers: *_dense.npy, *_sparse.npy, *_labels.npy.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("export", help="a prepared folder to .npy files")
    writing.add_argument("folder", type=Path, metavar="PREPARED")
    reading = commands.add_parser("import", help=".npy files to a prepared folder")
    reading.add_argument("folder", type=Path, metavar="FOLDER")
    reading.add_argument(
        "--sizes",
        type=_sizes,
        metavar="N[,N...]",
        help="rows of the tables; default: the largest id of each field and one more",
    )
    reading.add_argument("--modulo", action="store_true", help="take ids modulo the sizes")
    reading.add_argument(
        "--link", action="store_true", help="hard links to files that need no change, not copies"
    )
    for command in (writing, reading):
        command.add_argument("out", type=Path, metavar="OUT", help="new folder")
    return parser


if __name__ == "__main__":
    sys.exit(main())
