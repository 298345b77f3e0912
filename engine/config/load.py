"""From a YAML file and overrides to a checked configuration, also of older versions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stampede.engine.config import Config, check_divides, config_type
from stampede.engine.config.model import DEFAULT_NETWORK, execute_network_file
from stampede.engine.config.presets import below_old_runs, with_preset
from stampede.settings import (
    Section,
    SettingsError,
    cut,
    parse_yaml,
    read_yaml,
    sentences,
    shown,
)


def load_config(path: Path, overrides: Sequence[str] = (), world_size: int = 1) -> Config:
    """Read, override and check.

    Args:
        path: YAML file.
        overrides: `section.key=value`, the value in YAML.
        world_size: number of ranks, which must divide global batches.

    Raises:
        SettingsError: what is wrong, key by key, and what to write instead.
    """
    values = read_yaml(path, "`python launch.py --help` lists the shipped configurations")
    for override in overrides:
        _apply(values, override)
    try:
        return check_config(values, path, world_size)
    except SettingsError as mistake:
        said = str(mistake)
        # `model.hidden.0: ...`, `data.path, data.schema_file: ...`
        heads = re.findall(r"^  ([\w., ]+): ", said, re.M)
        keys = [f"{key}." for head in heads for key in head.split(", ")]
        wrong = [
            text
            for text in overrides
            if any(key.startswith(text.partition("=")[0] + ".") for key in keys)
        ]
        given = f"{path} with {cut(' '.join(wrong))}:" if wrong else f"{path}:"
        raise SettingsError(said.replace(f"{path}:", given, 1)) from None


def load_config_of_run(path: Path) -> Config:
    """The configuration in a run folder, perhaps of an older version.

    Raises:
        SettingsError: this version cannot use it.
    """
    values = read_yaml(path, "a run keeps it in its folder")
    return check_config(below_old_runs(without_gone_keys(values)), path)


def check_config(values: dict[str, Any], path: Path, world_size: int = 1) -> Config:
    """Fill in defaults and check.

    Args:
        values: by section and key; this changes them.
        path: their file; it names the run, and messages begin with it.
        world_size: number of ranks, which must divide global batches.

    Raises:
        SettingsError: what is wrong, key by key, and what to write instead.
    """
    # An empty section (`train:` alone) has all defaults.
    values = {key: {} if value is None else value for key, value in values.items()}
    execute_network_file(values.get("model"), path)
    values = with_preset(values)
    for *sections, key, default in (
        ("run", "name", _name_of(path)),
        ("model", "name", DEFAULT_NETWORK),
        ("data", "kind", "synthetic"),
        ("optim", "embedding", "optimizer", "adam"),
    ):
        _set_default(values, sections, key, default)
    try:
        config = config_type().model_validate(values)
    except ValidationError as failure:
        raise SettingsError(f"{path}:\n" + "\n".join(sentences(failure, config_type()))) from None
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", config.run.name):
        raise SettingsError(
            f"run.name: found {config.run.name!r}; write letters, digits, '.', '_' and '-' only"
        )
    check_divides(config, world_size, f"{path}:\n  ")
    return config


def _set_default(values: dict[str, Any], sections: list[str], key: str, default: Any) -> None:
    """Set a key that is not given; values that are not sections are left for the check."""
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            return
    values.setdefault(key, default)


def _name_of(path: Path) -> str:
    """A run's name from its file's; characters that are not allowed become '-'."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", path.stem).lstrip(".-_") or "run"


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.split(".")
    if not equals or (len(parts) < 2 and key != "preset") or not all(parts):
        raise SettingsError(
            f"override {shown(override)}: write section.key=value, e.g. train.epochs=3"
        )
    set_key(values, parts, parse_yaml(text, f"override {shown(override)}"))


def set_key(values: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    """Set a key; `parts` are its sections and its name."""
    for part in parts[:-1]:
        if not isinstance(values.get(part), dict):
            values[part] = {}
        values = values[part]
    values[parts[-1]] = value


# Keys of older versions, which are still in their runs and checkpoints.
_GONE = (
    "checkpoint.force",
    "evaluate.memory_gb",
    "train.on_divergence.rollbacks",
    "train.on_divergence.dense_lr_factor",
)


def without_gone_keys(saved: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A saved configuration without the keys that were removed since."""
    return {
        key: without_gone_keys(value, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in saved.items()
        if prefix + key not in _GONE
    }


def with_defaults(saved: dict[str, Any], section: Section) -> dict[str, Any]:
    """A saved configuration with the defaults of keys that were added since.

    With these defaults, a run behaves as before the keys existed.

    Args:
        saved: JSON of this section, perhaps of an older version.
        section: the current one. A section of another kind in `saved` is not completed: the keys
            that it lacks belong to the current kind.
    """
    fields = type(section).model_fields
    absent = {
        name: field.get_default(call_default_factory=True)
        for name, field in fields.items()
        if name not in saved and not field.is_required()
    }
    added = section.model_copy(update=absent).model_dump(mode="json", include=set(absent))
    filled = {**added, **saved}
    for name, field in fields.items():
        part, before = getattr(section, name), saved.get(name)
        if not isinstance(part, Section) or not isinstance(before, dict):
            continue
        kind = field.discriminator
        if kind is None or before.get(kind) == getattr(part, kind):
            filled[name] = with_defaults(before, part)
    return filled
