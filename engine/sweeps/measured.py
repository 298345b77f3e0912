"""A run folder: what configuration it is of, and what was measured at its best epoch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from stampede.engine.checkpoint import flat_keys
from stampede.engine.config import Config, load_config_of_run
from stampede.engine.recipe import open_keys
from stampede.engine.run_folder import RunFolder
from stampede.engine.sweeps.files import reading
from stampede.settings import SettingsError

# Where a run is and whether it continues is no part of what it computes.
_NOT_COMPARED = ("run.dir", "run.name", "checkpoint.resume")


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
    """Read a run folder; without any defined AUC there is no best epoch, and the last counts.

    Raises:
        RunFolderError: a file of it is damaged or absent.
    """
    instead = f"delete {folder.path} to train it anew"
    with reading(folder.summary, instead):
        summary = json.loads(folder.summary.read_text(encoding="utf-8"))
        best = summary["best_epoch"] or summary["epochs"]
        step = summary["steps"] // summary["epochs"] * best
        selected_on, seconds = summary["selected_on"], summary["train_seconds"]
        rows = round(summary["samples_per_second"] * seconds / summary["epochs"])
    with reading(folder.metrics, instead):
        at_best = {
            line["part"]: line
            for line in folder.lines()
            if line["kind"] == "evaluation" and line["step"] == step
        }
        selected = at_best[selected_on]
        # An evaluation has the seconds until then; those of a run are of all its epochs.
        test = {**summary, **at_best["test"], "train_seconds": seconds, "training_rows": rows}
    return Measured(test, selected, selected_on)


def compared(config: Config) -> dict[str, Any]:
    """What a run computes, by `section.key`."""
    values = flat_keys(config.model_dump(mode="json"))
    return {key: value for key, value in values.items() if key not in _NOT_COMPARED}


def difference(config: Config, folder: RunFolder) -> str:
    """The first key in which a run folder is not of a configuration; empty where it is.

    Keys that came later have their defaults.
    """
    try:
        there, here = compared(load_config_of_run(folder.config_file)), compared(config)
    except SettingsError as mistake:
        return f"its configuration cannot be used now: {mistake}"
    for key in dict.fromkeys([*here, *there]):
        if key in open_keys(config):
            continue
        if (key in here, here.get(key)) != (key in there, there.get(key)):
            return f"{key} is {_shown(there, key)} there and {_shown(here, key)} here"
    return ""


def _shown(values: dict[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "absent"
