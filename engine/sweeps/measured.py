"""A run folder: what configuration it is of, and what its run ended with."""

from __future__ import annotations

import json
from typing import Any

from stampede.engine.checkpoint import flat_keys
from stampede.engine.config import Config
from stampede.engine.config.load import load_config_of_run
from stampede.engine.recipe import open_keys
from stampede.engine.run_folder import RunFolder
from stampede.engine.summary import selected_metrics
from stampede.engine.sweeps.files import reading
from stampede.settings import SettingsError

# Where a run is and whether it continues is no part of what it computes.
_NOT_COMPARED = ("run.dir", "run.name", "checkpoint.resume")


def ended(folder: RunFolder) -> dict[str, Any]:
    """The `summary.json` of a run that has ended, see `stampede.engine.summary.summarize`.

    Raises:
        RunFolderError: it is damaged or absent.
    """
    with reading(folder.summary, f"delete {folder.path} to train it anew"):
        summary = json.loads(folder.summary.read_text(encoding="utf-8"))
        for key in ("selected_on", "best_epoch", "rows", "train_seconds"):
            summary[key]
        selected_metrics(summary)
    return summary


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
