"""Whether a checkpoint's tensors are those of a model: another network is no damage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from stampede.engine.checkpoint.manifest import Manifest
from stampede.engine.errors import RunFolderError

_MODEL = "model."

# Names of tables, of which a process may hold some only.
TABLES = "front."


def check_same_network(path: Path, manifest: Manifest, model: Mapping[str, Tensor]) -> None:
    """Refuse a model that is not the one that was trained, before anything is read into it.

    Args:
        path: the checkpoint, for the message.
        manifest: of it.
        model: the model's `state_dict`, its tensors on any device, sharded ones included.

    Raises:
        RunFolderError: a tensor is only in one of them, or of another size.
    """
    difference = network_difference(manifest, model)
    if difference is not None:
        raise RunFolderError(
            f"{path}: the network is not the one that was trained ({difference:.300}). The "
            "checkpoint is not damaged, keep it; put the section model of the configuration and "
            "the file of model.import back as they were, or train anew with another run.name"
        )


def network_difference(manifest: Manifest, model: Mapping[str, Tensor]) -> str | None:
    """The first difference between a model and the one that was trained; see the above."""
    saved = {
        name.removeprefix(_MODEL): entry.size
        for name, entry in manifest.tensors.items()
        if name.startswith(_MODEL)
    }
    for name, tensor in model.items():
        now = list(tensor.size())
        if name not in saved:
            return f"{name} {now} is not in the checkpoint"
        if saved[name] != now:
            return f"{name} is {saved[name]} in the checkpoint, {now} now"
    for name, size in saved.items():
        if name not in model and not name.startswith(TABLES):
            return f"{name} {size} is in the checkpoint only"
    return None
