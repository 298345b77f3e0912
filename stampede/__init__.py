# pyright: basic
"""Trains click-through-rate models with very large batches, with CowClip inside TorchRec.

from stampede import open_run, train

run = train("configs/quickstart.yaml", train={"epochs": 2})
run.metrics["validation"]["auc"], run.history, run.path
scores = open_run("runs/quickstart").score(frame)
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stampede.data.errors import DataError
    from stampede.engine.api import Run, configuration, open_run, train
    from stampede.engine.errors import (
        InterruptedRunError,
        RunFolderError,
        TrainingStoppedError,
    )
    from stampede.engine.exit_status import exit_status
    from stampede.engine.training.plateau import selection_score
    from stampede.settings import SettingsError

__version__ = "0.1.0"

__all__ = [
    "DataError",
    "InterruptedRunError",
    "Run",
    "RunFolderError",
    "SettingsError",
    "TrainingStoppedError",
    "configuration",
    "exit_status",
    "open_run",
    "selection_score",
    "train",
]

_MODULES = {
    "DataError": "data.errors",
    "InterruptedRunError": "engine.errors",
    "Run": "engine.api",
    "RunFolderError": "engine.errors",
    "SettingsError": "settings",
    "TrainingStoppedError": "engine.errors",
    "configuration": "engine.api",
    "exit_status": "engine.exit_status",
    "open_run": "engine.api",
    "selection_score": "engine.training.plateau",
    "train": "engine.api",
}


def __getattr__(name: str) -> Any:
    # Import lazily: using only the optimizer or preparing data must not import the rest.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with warnings.catch_warnings():
        # tqdm warns in a notebook without ipywidgets, where its bars are plain.
        warnings.filterwarnings("ignore", message="IProgress not found")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
