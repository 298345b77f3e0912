# pyright: basic
"""CowClip for embedding tables, in TorchRec's sharded tables and in plain PyTorch."""

# ruff: noqa: F401

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stampede.optim.clip import Clip, CowClip
    from stampede.optim.dense_adam import DenseAdam
    from stampede.optim.nonfinite import NonFiniteGradientError
    from stampede.optim.optimizers import (
        CowClipAdagrad,
        CowClipAdam,
        CowClipOptimizer,
        CowClipRowWiseAdagrad,
        CowClipRowWiseAdam,
        CowClipSGD,
        FrozenTables,
    )
    from stampede.optim.registry import register_clip, register_rule
    from stampede.optim.rules import RowStep, Rule
    from stampede.optim.scaling import Hyperparameters, Scaled, ScalingRule, scale
    from stampede.optim.schedules import Schedule, learning_rate
    from stampede.optim.sharded.backward_update import BackwardUpdate
    from stampede.optim.sharded.collections import (
        local_cowclip_tables,
        local_lookup,
        table_update,
    )
    from stampede.optim.sharded.sharders import cowclip_sharders
    from stampede.optim.sharded.tables import CowClipTables
    from stampede.optim.table_init import TableInit, drawn_by_id

# Imported lazily: plain PyTorch does not need TorchRec, and a configuration needs neither.
_NAMES = {
    "clip": ("Clip", "CowClip"),
    "dense_adam": ("DenseAdam",),
    "nonfinite": ("NonFiniteGradientError",),
    "optimizers": (
        *("CowClipAdagrad", "CowClipAdam", "CowClipRowWiseAdagrad", "CowClipRowWiseAdam"),
        *("CowClipOptimizer", "CowClipSGD", "FrozenTables"),
    ),
    "registry": ("register_clip", "register_rule"),
    "rules": ("RowStep", "Rule"),
    "scaling": ("Hyperparameters", "Scaled", "ScalingRule", "scale"),
    "schedules": ("Schedule", "learning_rate"),
    "sharded.backward_update": ("BackwardUpdate",),
    "sharded.collections": ("local_cowclip_tables", "local_lookup", "table_update"),
    "sharded.sharders": ("cowclip_sharders",),
    "sharded.tables": ("CowClipTables",),
    "table_init": ("TableInit", "drawn_by_id"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
