# pyright: basic
"""CTR networks over one embedding front."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stampede.models.options import NoOptions
from stampede.models.registry import (
    Network,
    NetworkShape,
    Normalization,
    network,
    network_names,
    register,
)

if TYPE_CHECKING:
    from stampede.models.ctr_model import CTRModel
    from stampede.models.embedding_front import EmbeddingFront, StoredColumns, table_name

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

_NEED_TORCH = {
    "CTRModel": "ctr_model",
    "EmbeddingFront": "embedding_front",
    "StoredColumns": "embedding_front",
    "table_name": "embedding_front",
}


def __getattr__(name: str) -> Any:
    # Reading a configuration needs the networks' names and options, but not torch.
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
