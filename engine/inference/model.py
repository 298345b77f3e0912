"""The model of a checkpoint, without optimizers and not sharded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stampede.data import Batch, GlobalBatches, Part
from stampede.engine.build import build_model, move_dense
from stampede.engine.checkpoint import check_same_network, read_manifest, read_tensors
from stampede.engine.inference.trained import Trained
from stampede.engine.step import TILE_ROWS
from stampede.models import CTRModel

_TABLES = "front."


class Scored(NamedTuple):
    """Samples in the order of their part, `[n]` float32 each.

    Attributes:
        logits: of a click.
        label: 0 or 1.
        weight: what a sample counts for.
    """

    logits: np.ndarray
    label: np.ndarray
    weight: np.ndarray


def dense_model(trained: Trained) -> CTRModel:
    """The model with the trained dense layers, on the CPU; its tables are on `meta`.

    Raises:
        RunFolderError: the checkpoint is damaged, or that of another network.
    """
    model = build_model(trained.config, trained.vocabulary_sizes, trained.numbers)
    check_same_network(trained.checkpoint, read_manifest(trained.checkpoint), model.state_dict())
    state = {
        name: tensor for name, tensor in model.state_dict().items() if not name.startswith(_TABLES)
    }
    read_tensors(trained.checkpoint, {"model": state}, alone=True)
    return model.eval()


def whole_model(trained: Trained, device: torch.device) -> CTRModel:
    """The trained model with its tables, on one device.

    Raises:
        RunFolderError: the checkpoint is damaged.
    """
    model = dense_model(trained)
    # Not the rest: buffers that no checkpoint holds would be lost.
    model.front.to_empty(device=device)
    tables = {
        name: tensor for name, tensor in model.state_dict().items() if name.startswith(_TABLES)
    }
    read_tensors(trained.checkpoint, {"model": tables}, alone=True)
    move_dense(model, device)
    return model


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
