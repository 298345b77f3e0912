"""A trained model: a run's checkpoint, its network with weights, and scoring."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stampede.data import Batch, GlobalBatches, Part
from stampede.engine.build import build_model, move_dense
from stampede.engine.checkpoint import (
    DamagedCheckpointError,
    being_read,
    check_finite,
    check_same_network,
    checkpoint_of,
    newest,
    read_manifest,
    read_tensors,
    readable,
    verify,
)
from stampede.engine.checkpoint.loading import TABLES
from stampede.engine.checkpoint.manifest import REMEDY, DataEntry
from stampede.engine.config import Config
from stampede.engine.config.load import load_config_of_run
from stampede.engine.errors import RunFolderError
from stampede.engine.inference.kept import check_unexecuted, imported_by
from stampede.engine.recipe import open_keys
from stampede.engine.run_folder import RunFolder
from stampede.engine.step import TILE_ROWS
from stampede.models import CTRModel
from stampede.settings import shown

BEST, NEWEST = "best", "newest"


@dataclass(frozen=True)
class Trained:
    """A checkpoint and its run.

    Attributes:
        run: the run folder.
        checkpoint: folder of the checkpoint.
        epoch: epochs trained.
        config: of the run.
        data: rows of each field's table, numeric inputs, and a checksum of the id encodings.
        held: keeps the run from deleting the checkpoint, see `being_read`.
    """

    run: Path
    checkpoint: Path
    epoch: int
    config: Config
    data: DataEntry
    held: BinaryIO | None = field(default=None, repr=False, compare=False)


def open_trained(path: Path, epoch: str | None = None, *, allow_import: bool = False) -> Trained:
    """Open a checkpoint of a run.

    Args:
        path: a run folder, or a checkpoint in it.
        epoch: which checkpoint of a run folder: `best` (default), `newest`, or an epoch's number.
        allow_import: whether a Python file with the run's own network is executed; this is logged.

    Raises:
        RunFolderError: there is no such run or checkpoint, it is damaged, or the file of its
            network may not be executed or has changed.
        SettingsError: the configuration of the run cannot be used.
    """
    if not path.exists():
        raise RunFolderError(
            f"{path}: no such run folder or checkpoint; write a run folder such as runs/quickstart"
        )
    checkpoint, held = being_read(lambda: choose_checkpoint(path.absolute(), epoch))
    run = RunFolder(checkpoint.parent.parent)
    if not run.config_file.is_file():
        raise RunFolderError(
            f"{checkpoint}: is not in a run folder ({run.config_file} is missing); do not move "
            "checkpoints out of their run folder"
        )
    verify(checkpoint)
    manifest = read_manifest(checkpoint)
    imported = imported_by(run.config_file)
    if imported and not allow_import:
        raise RunFolderError(
            f"{run.config_file}: its network is Python code, {shown(imported)}, which would be "
            "executed; write --allow-import if you trust it and this run folder"
        )
    check_unexecuted(run.path, run.config_file)
    config = load_config_of_run(run.config_file)
    if lacking := sorted(open_keys(config)):
        raise RunFolderError(
            f"{run.config_file}: no run wrote it ({lacking[0]} is missing); copy the run again"
        )
    if imported:
        print(f"model.import: {config.model.import_file} was executed", file=sys.stderr)
    epoch = manifest.progress.epoch
    return Trained(run.path, checkpoint, epoch, config, manifest.data, held)


def choose_checkpoint(path: Path, epoch: str | None = None, remedy: str | None = None) -> Path:
    """Choose a checkpoint's folder by reading manifests only; see `open_trained`.

    Args:
        path: absolute; may also be a run's `checkpoints` folder, or a link.
        remedy: advice for the error if the newest manifest is damaged; None: use the newest
            readable one and say so.

    Raises:
        RunFolderError: there is none.
    """
    path = _in_its_run(path)
    if path.parent == RunFolder(path.parent.parent).checkpoints:
        if epoch is not None:
            raise RunFolderError(
                f"{path} is a checkpoint of one epoch; leave --epoch out, or write the run folder "
                f"{path.parent.parent}"
            )
        return path
    folder = RunFolder(path).checkpoints
    last = newest(folder)
    if last is None:
        if periods := sorted(path.glob("period_*")):
            raise RunFolderError(
                f"{path}: each period of stampede incremental has its own run folder; write "
                f"{periods[-1]}, the newest"
            )
        siblings = sorted(path.parent.glob("period_*"))
        others = [one.name for one in siblings if newest(RunFolder(one).checkpoints)]
        if path.name.startswith("period_") and others and path.name < others[-1]:
            raise RunFolderError(
                f"{path}: its checkpoint was deleted, as only the newest periods keep theirs "
                f"(checkpoint.keep); there are: {', '.join(others)}"
            )
        raise RunFolderError(
            f"{path}: has no checkpoint ({folder} holds none); write a run folder such as "
            "runs/quickstart, trained for at least one epoch"
        )
    if epoch == NEWEST:
        return last
    if epoch in (None, BEST):
        try:
            best = read_manifest(last, remedy or REMEDY).progress.best_epoch
        except DamagedCheckpointError as failure:
            others = readable(folder)
            if remedy or not others:
                raise
            last, progress = others[0]
            best = progress.best_epoch
            print(f"{failure}; {last} is the newest that can be read", file=sys.stderr)
        # There is no best epoch before the first evaluation.
        return _existing(folder, best) if best else last
    if not epoch.isdecimal():
        raise RunFolderError(f"--epoch: found {epoch!r}; write best, newest, or a number")
    return _existing(folder, int(epoch))


def _in_its_run(path: Path) -> Path:
    """The run folder, or the checkpoint at its place in the run folder."""
    for found in (path, path.resolve()):
        if found == RunFolder(found.parent).checkpoints:
            return found.parent
        is_checkpoint = found.parent == RunFolder(found.parent.parent).checkpoints
        if is_checkpoint or RunFolder(found).checkpoints.is_dir():
            return found
    return path


def _existing(folder: Path, epoch: int) -> Path:
    found = checkpoint_of(folder, epoch)
    if found is None:
        there = ", ".join(sorted(path.name for path in folder.glob("epoch_*"))) or "none"
        raise RunFolderError(
            f"{folder}: no complete checkpoint of epoch {epoch}; there are: {there} "
            "(checkpoint.keep says how many a run keeps)"
        )
    return found


def dense_model(trained: Trained) -> CTRModel:
    """The model with the trained dense layers, on the CPU; its tables are on `meta`.

    Raises:
        RunFolderError: the checkpoint is damaged, or belongs to another network.
    """
    model = build_model(trained.config, trained.data.vocabulary_sizes, trained.data.numbers)
    check_same_network(trained.checkpoint, read_manifest(trained.checkpoint), model.state_dict())
    _read(trained, model, tables=False)
    return model.eval()


def whole_model(trained: Trained, device: torch.device) -> CTRModel:
    """The trained model with its tables, on one device.

    Raises:
        RunFolderError: the checkpoint is damaged.
    """
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
    """Samples in the order of their part, `[n]` float32 each.

    Attributes:
        logits: of a click.
        label: 0 or 1.
        weight: of the sample in metrics.
    """

    logits: np.ndarray
    label: np.ndarray
    weight: np.ndarray


class Scorer:
    """Scores parts of data sets.

    Args:
        model: with its tables.
        batch_size: samples looked up at a time.
    """

    def __init__(self, model: CTRModel, batch_size: int) -> None:
        self._model = model
        self._batch_size = batch_size
        self._device = model.bias.device

    @torch.no_grad()
    def scored(self, part: Part) -> Iterator[Scored]:
        """All rows of a part, in order, batch by batch."""
        batches = GlobalBatches(part, self._model.front.fields, self._batch_size, 0, 1)
        for batch in batches.epoch(0):
            logits = self._logits(batch.to(self._device, non_blocking=True))
            yield Scored(
                logits.cpu().numpy(), batch.label.cpu().numpy(), batch.weight.cpu().numpy()
            )

    def _logits(self, batch: Batch) -> Tensor:
        rows = self._model.front.lookup(batch.sparse)
        size = TILE_ROWS if rows.device.type == "cpu" else max(len(rows), 1)
        tiles = zip(rows.split(size), batch.dense.split(size), strict=True)
        return torch.cat([self._model.logits(tile, dense).float() for tile, dense in tiles])
