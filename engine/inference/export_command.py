"""Export a model: `stampede export CHECKPOINT OUT`."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from stampede import stores
from stampede.data.exit_status import exit_status
from stampede.engine.console import readable_bytes, table
from stampede.engine.errors import RunFolderError
from stampede.engine.inference.options import RowType, add_checkpoint_arguments, check_exists
from stampede.engine.start_up import importing

# torch, which takes seconds to import, is needed by functions only.
if TYPE_CHECKING:
    from stampede.engine.inference.trained import Trained


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 2 for a user's mistake."""
    given = _parser().parse_args(arguments)
    return exit_status(lambda: _export(given), RunFolderError)


def _export(given: argparse.Namespace) -> None:
    check_exists(given.checkpoint)
    with importing():
        from stampede.engine.inference.trained import open_trained

    trained = open_trained(given.checkpoint, given.epoch, allow_import=given.allow_import)
    with stores.outgoing(given.out, given.overwrite) as out:
        # Absolute, as the working folder itself may be replaced.
        _export_to(out.resolve(), given, trained)


def _export_to(folder: Path, given: argparse.Namespace, trained: Trained) -> None:
    if given.since is not None:
        _export_delta(given, trained, folder)
    elif given.tolerance:
        raise RunFolderError("--tolerance works with --since only; write --since PACKAGE too")
    elif given.format == "onnx":
        _export_onnx(given, trained, folder)
    elif given.most_ids is not None:
        raise RunFolderError("--most-ids works with --format onnx only; write --format onnx too")
    else:
        _export_package(given, trained, folder)


def _export_package(given: argparse.Namespace, trained: Trained, folder: Path) -> None:
    from stampede.engine.inference.packaging import export

    rows = given.rows or "fp32"
    export(trained, folder, rows, given.overwrite)
    _tell(
        package=folder,
        model=f"{trained.config.model.name} of {trained.run}, epoch {trained.epoch}",
        tables=f"{len(trained.data.vocabulary_sizes) - len(trained.data.shared)} tables in {rows}",
        size=_size(folder),
        to_score=f"see the first lines of {folder / 'load.py'}",
    )


def _export_delta(given: argparse.Namespace, trained: Trained, folder: Path) -> None:
    from stampede.engine.inference.deltas import export_delta

    if given.format == "onnx":
        raise RunFolderError("--since needs a package; leave out --since or --format onnx")
    for name in ("rows", "most_ids", "overwrite"):
        if getattr(given, name):
            raise RunFolderError(
                f"--{name.replace('_', '-')} cannot be combined with --since, which uses the "
                "package's; leave it out"
            )
    if not 0.0 <= given.tolerance < math.inf:
        raise RunFolderError(f"--tolerance: found {given.tolerance}; write a number of at least 0")
    since = stores.fetched(given.since)
    delta = export_delta(trained, since, folder, given.tolerance)
    _tell(
        delta=folder,
        since=given.since,
        rows=f"{delta.changed:,} of {delta.rows:,} changed or new; {delta.ids:,} ids",
        size=f"{_size(folder)}, the package {_size(since)}",
        to_apply=f"python {given.since}/update.py {given.since} {folder} --out NEW_PACKAGE",
    )


def _export_onnx(given: argparse.Namespace, trained: Trained, path: Path) -> None:
    try:
        # torch.onnx imports it only after all tables have been read.
        import onnxscript  # noqa: F401

        from stampede.engine.inference.onnx_file import MOST_IDS, export_onnx
    except ModuleNotFoundError as failure:
        if failure.name not in ("onnx", "onnxscript"):
            raise
        raise RunFolderError(
            f"--format onnx needs the package {failure.name}, which is not installed; run: pip "
            "install onnxscript"
        ) from None
    rows = given.rows or "fp32"
    most_ids = MOST_IDS if given.most_ids is None else given.most_ids
    about = export_onnx(trained, path, rows, given.overwrite, most_ids)
    kinds = Counter(one["kind"] for one in about["inputs"])
    _tell(
        file=path,
        model=f"{about['network']} of {trained.run}, epoch {trained.epoch}",
        tables=f"{len(about['fields'])} tables in {rows}",
        inputs=", ".join(f"{count} {kind}" for kind, count in kinds.items()),
        size=readable_bytes(path.stat().st_size),
    )


def _tell(**said: object) -> None:
    print(table((name.replace("_", " "), str(value)) for name, value in said.items()))


def _size(folder: Path) -> str:
    files = (path for path in folder.rglob("*") if path.is_file())
    return readable_bytes(sum(path.stat().st_size for path in files))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stampede export",
        description="Write a trained model as a folder that scores without stampede: dense layers\n"
        "(JSON), weights and tables (safetensors), vocabularies, and load.py, which needs torch,\n"
        "safetensors, polars and numpy. No file is a pickle; load.py checks the SHA-256 of all.\n"
        "With --format onnx: one file for onnxruntime and Triton Inference Server.",
        epilog="example:\n"
        "  stampede export runs/criteo model --rows int8\n"
        "  stampede export runs/ads/period_0007 delta_7 --since model_6\n"
        "  stampede export runs/criteo model.onnx --format onnx\n"
        "  cd model && python -c 'from load import load; print(load().columns)'",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_checkpoint_arguments(parser)
    add = parser.add_argument
    add("out", metavar="OUT", help="new folder for the package, or NAME.onnx")
    add(
        "--rows",
        choices=get_args(RowType),
        help="how the tables' rows are stored: fp32 (default), exact; fp16; int8 with a scale per "
        "row",
    )
    add("--overwrite", action="store_true", help="replace an earlier export at OUT")
    add(
        "--format",
        choices=["package", "onnx"],
        default="package",
        help="package (default): a folder with load.py; onnx: one file (needs the package "
        "onnxscript)",
    )
    add(
        "--most-ids",
        type=int,
        metavar="N",
        help="with --format onnx: vocabularies with more ids are left out, and their inputs take "
        "rows of the tables; default 1,000,000",
    )
    add(
        "--since",
        metavar="PACKAGE",
        help="write only the differences from this package, to apply with its update.py",
    )
    add(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="X",
        help="with --since: leave out rows whose values changed by at most this; default 0",
    )
    return parser
