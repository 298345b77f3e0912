"""CTR networks over one embedding front."""

from stampede.models import deepfm as _deepfm  # registers itself
from stampede.models.ctr_model import CTRModel
from stampede.models.embedding_front import EmbeddingFront, StoredColumns, table_name
from stampede.models.registry import NetworkShape, network_names, register

del _deepfm

__all__ = [
    "CTRModel",
    "EmbeddingFront",
    "NetworkShape",
    "StoredColumns",
    "network_names",
    "register",
    "table_name",
]
