"""From click logs, real or synthetic, to global batches."""

# ruff: noqa: F401

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stampede.data.errors import DataError
    from stampede.data.global_batches import GlobalBatches
    from stampede.data.order import Order
    from stampede.data.prepared.reader import open_prepared
    from stampede.data.samples import Bag, Batch, Dataset, Part, Samples, click_shares, only_labels
    from stampede.data.schema.features import usual_min_count
    from stampede.data.schema.schema import Vocabulary, load_schema
    from stampede.data.synthetic import SyntheticClicks

# Imported lazily: preparing and describing data needs no torch, which takes seconds to import.
_MODULES = {
    "Bag": "samples",
    "Batch": "samples",
    "DataError": "errors",
    "Dataset": "samples",
    "GlobalBatches": "global_batches",
    "Order": "order",
    "Part": "samples",
    "Samples": "samples",
    "SyntheticClicks": "synthetic",
    "Vocabulary": "schema.schema",
    "click_shares": "samples",
    "load_schema": "schema.schema",
    "only_labels": "samples",
    "open_prepared": "prepared.reader",
    "usual_min_count": "schema.features",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
