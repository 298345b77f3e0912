"""Reads trained tables without the padding that they are stored with."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from stampede.engine.checkpoint.manifest import read_manifest, weights_name
from stampede.engine.checkpoint.tensors import check_finite, read_tensors
from stampede.engine.errors import RunFolderError
from stampede.models import StoredColumns, table_name


class FieldWeights(NamedTuple):
    """Weights of one id field.

    Attributes:
        embedding: `[rows, dim]`.
        first_order: `[rows, 1]`, as added to the logit: the stored weights times
            `model.first_order_scale`.
    """

    embedding: Tensor
    first_order: Tensor


def read_field(checkpoint: Path, field: str) -> FieldWeights:
    """A field's weights from a checkpoint, in one process and without a model.

    Args:
        checkpoint: folder such as `runs/quickstart/checkpoints/epoch_0001`.

    Raises:
        RunFolderError: it is not a whole checkpoint, or has no such field.
    """
    stored = read_stored_field(checkpoint, field, finite=False)
    scale = read_manifest(checkpoint).first_order_scale
    return stored._replace(first_order=stored.first_order * scale)


def read_stored_field(checkpoint: Path, field: str, finite: bool = True) -> FieldWeights:
    """`read_field` with first-order weights as stored, before the model scales them.

    Args:
        finite: whether to refuse weights that are not finite, with a `RunFolderError`.
    """
    manifest = read_manifest(checkpoint)
    if field not in manifest.data.vocabulary_sizes:
        fields = ", ".join(manifest.data.vocabulary_sizes)
        raise RunFolderError(f"{checkpoint} has no field {field!r}; it has {fields}")
    field = manifest.data.shared.get(field, field)
    table = manifest.tables[table_name(field)]
    stored = torch.empty(table.rows, table.columns["padding"][1])
    name = weights_name(field, manifest.tensors, "model.").removeprefix("model.")
    read_tensors(checkpoint, {"model": {name: stored}}, alone=True)
    if finite:
        check_finite(checkpoint, {name: stored})
    return FieldWeights(*StoredColumns(table.columns["embedding"][1]).split(stored))
