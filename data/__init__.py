"""From click logs, real or synthetic, to global batches."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stampede.data.errors import DataError
    from stampede.data.global_batches import GlobalBatches
    from stampede.data.order import Order
    from stampede.data.samples import (
        Bag,
        Batch,
        Dataset,
        Part,
        Samples,
        click_share,
        only_label,
    )
    from stampede.data.synthetic import SyntheticClicks

_MODULES = {
    "DataError": "errors",
    "GlobalBatches": "global_batches",
    "Order": "order",
    "SyntheticClicks": "synthetic",
    **dict.fromkeys(
        ("Bag", "Batch", "Dataset", "Part", "Samples", "click_share", "only_label"), "samples"
    ),
}

__all__ = [
    "Bag",
    "Batch",
    "DataError",
    "Dataset",
    "GlobalBatches",
    "Order",
    "Part",
    "Samples",
    "SyntheticClicks",
    "click_share",
    "only_label",
]


def __getattr__(name: str) -> Any:
    # Preparing and describing data needs no torch, which takes seconds and memory to import.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
