"""Refuses a start whose processes would not train the same run; names the host that differs."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import stampede
from stampede.engine.checkpoint.manifest import versions
from stampede.engine.config import Config
from stampede.engine.config.model import executed_source
from stampede.engine.config.presets import flat_keys
from stampede.engine.processes import Processes, together
from stampede.settings import SettingsError


def check_same_run(config: Config, processes: Processes) -> None:
    """Refuse a process with another configuration or other programs; all ranks must call it.

    Raises:
        SettingsError: what differs from rank 0, and on which host.
    """
    if processes.world_size == 1:
        return
    settings = together(lambda: flat_keys(config.model_dump(mode="json")), processes.group)
    programs = together(lambda: _programs(config), processes.group)

    def compare() -> None:
        for rank in range(1, processes.world_size):
            for key, value in settings[0].items():
                if settings[rank].get(key) != value:
                    raise SettingsError(
                        f"{key}: found {settings[rank].get(key)!r:.200} for "
                        f"{processes.named(rank)}, and {value!r:.200} for {processes.named(0)}; "
                        "start all with the same configuration"
                    )
            for what, value in programs[0].items():
                if programs[rank].get(what) != value:
                    raise SettingsError(
                        f"{what} is {programs[rank].get(what)} for {processes.named(rank)}, and "
                        f"{value} for {processes.named(0)}; install the same everywhere"
                    )

    processes.on_main(compare)


def _programs(config: Config) -> dict[str, str]:
    """Versions of the libraries, and fingerprints of the code that computes."""
    found = {**versions(), "the source of stampede": _source_fingerprint()}
    file = config.model.import_file
    if file:
        source = executed_source(file)
        found[f"the content of {file}"] = hashlib.sha256(source).hexdigest()[:12]
    return found


def _source_fingerprint() -> str:
    """Checkouts have one version for many commits, so their files are compared too."""
    digest = hashlib.sha256()
    # Folders of a checkout are links, which `rglob` would not follow.
    for folder, folders, names in os.walk(Path(stampede.__file__).parent, followlinks=True):
        # What a run does not use.
        folders[:] = sorted({*folders} - {"lab"})
        for name in sorted(names):
            if name.endswith((".py", ".cpp", ".h")):
                digest.update(name.encode())
                digest.update(Path(folder, name).read_bytes())
    return digest.hexdigest()[:12]
