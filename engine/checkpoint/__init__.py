"""Checkpoints: tables, dense layers, both optimizers, position, configuration."""

from stampede.engine.checkpoint.comparing import changes, flat_keys
from stampede.engine.checkpoint.errors import DamagedCheckpointError
from stampede.engine.checkpoint.loading import load
from stampede.engine.checkpoint.manifest import Manifest, read_manifest, weights_name
from stampede.engine.checkpoint.names import checkpoint_of, newest
from stampede.engine.checkpoint.progress import Progress
from stampede.engine.checkpoint.same_network import check_same_network
from stampede.engine.checkpoint.saving import Checkpoints
from stampede.engine.checkpoint.tensors import read_tensors
from stampede.engine.checkpoint.verifying import newest_whole, verify

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
