"""A trained model: a run's checkpoint, its network with weights, and scoring."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stampede import stores
from stampede.data import GlobalBatches, Part
from stampede.engine.checkpoint.manifest import TABLES, DataEntry, read_manifest
from stampede.engine.checkpoint.retention import being_read, choose_checkpoint, verify
from stampede.engine.checkpoint.tensors import check_finite, check_same_network, read_tensors
from stampede.engine.config import Config
from stampede.engine.config.load import load_config_of_run
from stampede.engine.errors import RunFolderError
from stampede.engine.inference.kept import check_unexecuted
from stampede.engine.inference.options import check_exists
from stampede.engine.inference.package.load import each_alone
from stampede.engine.job import build_model, move_dense
from stampede.engine.processes import denormals_as_zero
from stampede.engine.results.run_folder import RunFolder
from stampede.engine.step import TILE_ROWS
from stampede.files import new_file
from stampede.models import CTRModel
from stampede.models.histories import history, tiles
from stampede.settings import read_yaml, shown


@dataclass(frozen=True)
class Trained:
    """The folders of a run and of its checkpoint, and what it was trained on.

    Attributes:
        epoch: epochs trained.
        held: keeps the run from deleting the checkpoint, see `being_read`.
    """

    run: Path
    checkpoint: Path
    epoch: int
    config: Config
    data: DataEntry
    held: BinaryIO | None = field(default=None, repr=False, compare=False)


def open_trained(
    path: str | Path, epoch: str | None = None, *, allow_import: bool = False
) -> Trained:
    """Open a checkpoint of a run.

    Args:
        path: a run folder, or a checkpoint in it; or the URL of a run folder.
        epoch: which checkpoint of a run folder: `best` (default), `newest`, or an epoch's number.
        allow_import: whether a Python file with the run's own network is executed; this is logged.

    Raises:
        RunFolderError: there is no such run or checkpoint, it is damaged, or the file of its
            network may not be executed or has changed.
        SettingsError: the configuration of the run cannot be used.
    """
    path = _fetched(path, epoch)
    check_exists(path)
    checkpoint, held = being_read(lambda: choose_checkpoint(path.absolute(), epoch))
    run = RunFolder(checkpoint.parent.parent)
    if not run.config_file.is_file():
        raise RunFolderError(
            f"{checkpoint}: is not in a run folder ({run.config_file} is missing); do not move "
            "checkpoints out of their run folder"
        )
    verify(checkpoint)
    manifest = read_manifest(checkpoint)
    # Before anything is executed.
    section = read_yaml(run.config_file, "a run keeps it in its folder").get("model")
    imported = section.get("import") if isinstance(section, dict) else None
    if imported and not allow_import:
        raise RunFolderError(
            f"{run.config_file}: its network is Python code, {shown(imported)}, which would be "
            "executed; write --allow-import if you trust it and this run folder"
        )
    check_unexecuted(run.path, imported)
    config = load_config_of_run(run.config_file)
    if imported:
        print(f"model.import: {config.model.import_file} was executed", file=sys.stderr)
    return Trained(run.path, checkpoint, manifest.progress.epoch, config, manifest.data, held)


def _fetched(path: str | Path, epoch: str | None) -> Path:
    """A run; of one in a store, of the checkpoints' tensors only those that are needed."""
    here = stores.fetched(path, without=stores.is_checkpoint_data)
    if not stores.is_url(path):
        return here
    wanted = None
    # A run may save another one in the meantime.
    while wanted != (chosen := choose_checkpoint(here.absolute(), epoch).name):
        wanted = chosen
        stores.fetched(path, without=partial(_is_other, wanted))
    return here


def _is_other(checkpoint: str, name: str) -> bool:
    return stores.is_checkpoint_data(name) and f"/{checkpoint}/" not in name


def dense_model(trained: Trained) -> CTRModel:
    """The model with the trained dense layers, on the CPU; its tables are on `meta`.

    Raises:
        RunFolderError: the checkpoint is damaged, or belongs to another network.
    """
    model = build_model(trained.config, trained.data)
    model.negative_rate = trained.config.train.negative_rate
    manifest = read_manifest(trained.checkpoint)
    check_same_network(trained.checkpoint, manifest, model.state_dict())
    model.calibration.set(manifest.progress.calibration)
    _read(trained, model, tables=False)
    return model.eval()


def whole_model(trained: Trained, device: torch.device) -> CTRModel:
    """The trained model with its tables, on one device; raises as `dense_model`."""
    model = dense_model(trained)
    # Only the tables: buffers outside the checkpoint would be lost.
    model.front.to_empty(device=device)
    _read(trained, model, tables=True)
    move_dense(model, device)
    return model


def _read(trained: Trained, model: CTRModel, tables: bool) -> None:
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name.startswith(TABLES) == tables
    }
    # Masks of some networks hold infinities on purpose.
    masks = [n for n, b in model.named_buffers() if not b.is_meta and not b.isfinite().all()]
    read_tensors(trained.checkpoint, {"model": state}, alone=True)
    check_finite(trained.checkpoint, {n: t for n, t in state.items() if n not in masks})


class Scored(NamedTuple):
    """Samples in the order of their part, `[n]` float32 each; with several goals, logits and
    labels `[n, goals]`, NaN where a label is missing.
    """

    logits: np.ndarray
    label: np.ndarray
    weight: np.ndarray


@torch.no_grad()
def scored(model: CTRModel, part: Part, batch_size: int) -> Iterator[Scored]:
    """All rows of a part, in order, batch by batch, by a model with its tables."""
    device = model.bias.device
    padded = [name in model.front.sequences for name in model.front.histories]

    def dense(rows: Tensor, numbers: Tensor, of_ids: list[tuple[Tensor, Tensor]]) -> Tensor:
        found = zip(model.front.histories, starmap(history, of_ids), strict=True)
        return model.logits(rows, numbers, histories=dict(found))

    with denormals_as_zero():
        for batch in GlobalBatches(part, model.front.fields, batch_size, 0, 1).epoch(0):
            moved = batch.to(device, non_blocking=True)
            size = TILE_ROWS if device.type == "cpu" else max(len(moved.dense), 1)
            logits = torch.cat([
                each_alone(
                    dense, rows, numbers, [(h.values, h.lengths) for h in of_ids.values()], padded
                )
                for (rows, of_ids), numbers in zip(
                    tiles(*model.front.lookup(moved.sparse), size),
                    moved.dense.split(size),
                    strict=True,
                )
            ])  # fmt: skip
            columns = (logits.float(), batch.label, batch.weight)
            yield Scored(*(column.cpu().numpy() for column in columns))


@contextmanager
def new_output(path: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a path to write to; it is renamed to `path` if the block succeeds, else removed.

    Raises:
        RunFolderError: the file already exists, or cannot be written.
    """
    try:
        if path.is_dir():
            raise RunFolderError(f"{path}: is a folder; write the name of a file")
        if path.exists() and not overwrite:
            raise RunFolderError(f"{path}: already exists; write --overwrite, or another name")
        with new_file(path) as unfinished:
            yield unfinished
    except OSError as failure:
        raise RunFolderError(
            f"{path}: cannot be written ({failure.strerror or failure}); make room, or write "
            "another file"
        ) from None
