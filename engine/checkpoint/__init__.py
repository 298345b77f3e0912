"""Checkpoints: tables, dense layers, both optimizers, position, configuration."""

from stampede.engine.checkpoint.loading import changes, check_same_network, flat_keys, load
from stampede.engine.checkpoint.manifest import (
    DamagedCheckpointError,
    Manifest,
    Progress,
    read_manifest,
    weights_name,
)
from stampede.engine.checkpoint.retention import checkpoint_of, newest, newest_whole, verify
from stampede.engine.checkpoint.saving import Checkpoints
from stampede.engine.checkpoint.tensors import read_tensors

__all__ = [
    "Checkpoints",
    "DamagedCheckpointError",
    "Manifest",
    "Progress",
    "changes",
    "check_same_network",
    "checkpoint_of",
    "flat_keys",
    "load",
    "newest",
    "newest_whole",
    "read_manifest",
    "read_tensors",
    "verify",
    "weights_name",
]
