"""Checkpoints: tables, dense layers, both optimizers, position, configuration."""

from stampede.engine.checkpoint.loading import changes, check_same_network, flat_keys, load
from stampede.engine.checkpoint.manifest import (
    DamagedCheckpointError,
    Manifest,
    Progress,
    read_manifest,
    weights_name,
)
from stampede.engine.checkpoint.retention import (
    being_read,
    checkpoint_of,
    delete_all,
    newest,
    newest_whole,
    readable,
    verify,
)
from stampede.engine.checkpoint.saving import Checkpoints
from stampede.engine.checkpoint.tensors import check_finite, read_tensors

__all__ = [
    "Checkpoints",
    "DamagedCheckpointError",
    "Manifest",
    "Progress",
    "being_read",
    "changes",
    "check_finite",
    "check_same_network",
    "checkpoint_of",
    "delete_all",
    "flat_keys",
    "load",
    "newest",
    "newest_whole",
    "read_manifest",
    "read_tensors",
    "readable",
    "verify",
    "weights_name",
]
