"""What the commands that score and export ask for; light, so that `--help` is fast."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stampede import stores
from stampede.data.options import OnBadRow
from stampede.data.prepared.manifest import PartName
from stampede.engine.errors import RunFolderError

OnBadValue = Literal["error", "missing"]

RowType = Literal["fp32", "fp16", "int8"]

# Means the data that the run was trained and tested on.
OWN_DATA = "@run"


@dataclass(frozen=True)
class PredictionOptions:
    """How rows are scored; see `stampede predict --help`."""

    part: PartName | None = None
    on_bad_row: OnBadRow = "error"
    on_bad_value: OnBadValue = "error"
    ignore_label: bool = False
    batch_size: int = 8192
    device: str = "auto"
    overwrite: bool = False


def check_exists(path: str | Path) -> None:
    """Refuse a run folder or checkpoint that is not there, before torch is imported."""
    if not stores.is_url(path) and not stores.local(path).exists():
        raise RunFolderError(
            f"{path}: no such run folder or checkpoint; write a run folder such as runs/quickstart"
        )


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a command that `open_trained` takes."""
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="a run folder, or a checkpoint in it")
    add(
        "--epoch",
        metavar="EPOCH",
        help="checkpoint of a run folder: best (default), newest, or a number",
    )
    add(
        "--allow-import",
        action="store_true",
        help="execute the Python file of the network, if the run was trained with your own",
    )
