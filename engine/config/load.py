"""From a YAML file and overrides to a checked configuration, also of older versions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stampede.engine.config import Config, check_divides, config_type
from stampede.engine.config.model import DEFAULT_NETWORK, execute_network_file
from stampede.engine.config.presets import below_old_runs, with_preset, without_removed
from stampede.settings import SettingsError, cut, parse_yaml, read_yaml, sentences, shown


def load_config(path: Path, overrides: Sequence[str] = (), world_size: int = 1) -> Config:
    """Read, override (`section.key=value`) and check; `world_size` divides the global batches.

    Raises:
        SettingsError: what is wrong, key by key, and what to write instead.
    """
    values = read_yaml(path, "`python launch.py --help` lists the shipped configurations")
    for override in overrides:
        key, equals, text = override.partition("=")
        parts, what = key.split("."), f"override {shown(override)}"
        if not equals or (len(parts) < 2 and key != "preset") or not all(parts):
            raise SettingsError(f"{what}: write section.key=value, e.g. train.epochs=3")
        set_key(values, parts, parse_yaml(text, what))
    try:
        return check_config(values, path, world_size)
    except SettingsError as mistake:
        # `model.hidden.0: ...`, `data.path, data.schema_file: ...`
        heads = re.findall(r"^  ([\w., ]+): ", str(mistake), re.M)
        keys = [f"{key}." for head in heads for key in head.split(", ")]
        given_keys = {text: text.partition("=")[0] + "." for text in overrides}
        wrong = [t for t, given in given_keys.items() if any(k.startswith(given) for k in keys)]
        given = f"{path} with {cut(' '.join(wrong))}:" if wrong else f"{path}:"
        raise SettingsError(str(mistake).replace(f"{path}:", given, 1)) from None


def load_config_of_run(path: Path) -> Config:
    """The configuration in a run folder, perhaps of an older version.

    Raises:
        SettingsError: this version cannot use it.
    """
    values = read_yaml(path, "a run keeps it in its folder")
    for section in ("data", "model", "optim", "train"):
        if section not in values:
            raise SettingsError(
                f"{path}: no run wrote it ({section} is missing); copy the run again"
            )
    return check_config(below_old_runs(without_removed(values)), path)


def check_config(values: dict[str, Any], path: Path, world_size: int = 1) -> Config:
    """Fill in defaults and check.

    Args:
        values: by section and key; this changes them.
        path: their file; it names the run, and messages begin with it.

    Raises:
        SettingsError: what is wrong, key by key, and what to write instead.
    """
    # An empty section (`train:` alone) has all defaults.
    values = {key: {} if value is None else value for key, value in values.items()}
    execute_network_file(values.get("model"), path)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", path.stem).lstrip(".-_") or "run"
    try:
        config = _validated(with_preset(values), name)
    except ValidationError as failure:
        raise SettingsError(f"{path}:\n" + "\n".join(sentences(failure, config_type()))) from None
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", config.run.name):
        raise SettingsError(
            f"run.name: found {config.run.name!r}; write letters, digits, '.', '_' and '-' only"
        )
    check_divides(config, world_size, f"{path}:\n  ")
    return config


def _validated(values: dict[str, Any], name: str) -> Config:
    """The configuration; this changes `values`, and names the run if it has no name."""
    for key, default in (
        ("run.name", name),
        ("model.name", DEFAULT_NETWORK),
        ("data.kind", "synthetic"),
        ("optim.embedding.optimizer", "adam"),
        ("optim.embedding.clip.granularity", "cowclip"),
    ):
        *sections, last = key.split(".")
        place: Any = values
        for section in sections:
            # A value that is not a section is left for the check.
            place = place.setdefault(section, {}) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place.setdefault(last, default)
    return config_type().model_validate(values)


def set_key(values: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    """Set a key; `parts` are its sections and its name."""
    for part in parts[:-1]:
        if not isinstance(values.get(part), dict):
            values[part] = {}
        values = values[part]
    values[parts[-1]] = value


def with_defaults(saved: dict[str, Any]) -> dict[str, Any]:
    """A saved configuration, completed by the values of keys that were added since.

    With these values, a run behaves as before the keys existed. A configuration that this version
    refuses is returned as it is.
    """
    try:
        return _validated(below_old_runs(without_removed(saved)), "run").model_dump(mode="json")
    except ValidationError:
        return saved
