"""CTR networks over one embedding front."""

# Each registers its network.
from stampede.models import autoint, dcn, deepfm, dlrm, finalmlp, masknet, wide_deep, xdeepfm
from stampede.models.ctr_model import CTRModel
from stampede.models.embedding_front import EmbeddingFront, StoredColumns, table_name
from stampede.models.registry import (
    Network,
    NetworkShape,
    NoOptions,
    Normalization,
    network,
    network_names,
    register,
)

del autoint, dcn, deepfm, dlrm, finalmlp, masknet, wide_deep, xdeepfm

__all__ = [
    "CTRModel",
    "EmbeddingFront",
    "Network",
    "NetworkShape",
    "NoOptions",
    "Normalization",
    "StoredColumns",
    "network",
    "network_names",
    "register",
    "table_name",
]
