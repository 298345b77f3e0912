"""A run folder: what configuration it is of, and what was measured at its best epoch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from stampede.engine.config import Config, load_config, to_yaml
from stampede.engine.run_folder import RunFolder
from stampede.settings import SettingsError


@dataclass(frozen=True)
class Measured:
    """A finished run.

    Attributes:
        test: metrics of the test part at the best epoch, and figures of the whole run.
        selected: metrics of the part that chose the best epoch.
        selected_on: that part.
    """

    test: dict[str, Any]
    selected: dict[str, Any]
    selected_on: str


def measured(folder: RunFolder) -> Measured:
    """Read a run folder; without any defined AUC there is no best epoch, and the last counts."""
    summary = json.loads((folder.path / "summary.json").read_text(encoding="utf-8"))
    best = summary["best_epoch"] or summary["epochs"]
    step = summary["steps"] // summary["epochs"] * best
    at_best = {
        line["part"]: line
        for line in folder.lines()
        if line["kind"] == "evaluation" and line["step"] == step
    }
    selected_on = summary["selected_on"]
    # An evaluation has the seconds until then; those of a run are of all its epochs.
    test = {**summary, **at_best["test"], "train_seconds": summary["train_seconds"]}
    return Measured(test, at_best[selected_on], selected_on)


def is_of(config: Config, folder: RunFolder) -> bool:
    """Whether a run folder is of a configuration; keys that came later have their defaults."""
    try:
        return to_yaml(load_config(folder.config_file)) == to_yaml(config)
    except SettingsError:
        return False
