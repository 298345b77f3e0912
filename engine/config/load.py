"""From a YAML file and overrides to a checked configuration; those that older versions saved."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stampede.engine.config import Config, check_divides, config_type
from stampede.engine.config.model import DEFAULT_NETWORK, execute_network_file
from stampede.engine.config.presets import below_old_runs, with_preset
from stampede.settings import Section, SettingsError, parse_yaml, read_yaml, sentences, shown


def load_config(path: Path, overrides: Sequence[str] = (), world_size: int = 1) -> Config:
    """Read, override and check.

    Args:
        path: YAML file.
        overrides: `section.key=value`, the value in YAML.
        world_size: number of ranks that global batches are divided among.

    Raises:
        SettingsError: what is wrong, key by key, and what to write instead.
    """
    values = read_yaml(path, "`python launch.py --help` lists the shipped configurations")
    return _checked(values, path, overrides, world_size)


def load_config_of_run(path: Path) -> Config:
    """The configuration that a run wrote into its folder, perhaps one of an older version.

    Raises:
        SettingsError: it cannot be used now.
    """
    values = read_yaml(path, "a run keeps it in its folder")
    return _checked(below_old_runs(without_gone_keys(values)), path)


def _checked(
    values: dict[str, Any], path: Path, overrides: Sequence[str] = (), world_size: int = 1
) -> Config:
    for override in overrides:
        _apply(values, override)
    return check_config(values, path, world_size)


def check_config(values: dict[str, Any], path: Path, world_size: int = 1) -> Config:
    """Fill in defaults and check.

    Args:
        values: by section and key; changed.
        path: where they are from: the run has its name, and messages begin with it.
        world_size: number of ranks that global batches are divided among.

    Raises:
        SettingsError: what is wrong, key by key, and what to write instead.
    """
    # An empty section (`train:` alone) is one with all defaults.
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
    _check_run_name(config.run.name)
    check_divides(config, world_size, f"{path}:\n  ")
    return config


def _set_default(values: dict[str, Any], sections: list[str], key: str, default: Any) -> None:
    """Set a key of a section that is not given; leave alone what is no section."""
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            return
    values.setdefault(key, default)


def _name_of(path: Path) -> str:
    """Name of a run, from its file's: other characters than those allowed become '-'."""
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
    """Give a key a value; `parts` are its sections and its own name."""
    for part in parts[:-1]:
        if not isinstance(values.get(part), dict):
            values[part] = {}
        values = values[part]
    values[parts[-1]] = value


def _check_run_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise SettingsError(
            f"run.name: found {name!r}; write letters, digits, '.', '_' and '-' only"
        )


# Keys of older versions, which their runs and checkpoints hold.
_GONE = (
    "checkpoint.force",
    "evaluate.memory_gb",
    "train.on_divergence.rollbacks",
    "train.on_divergence.dense_lr_factor",
)


def without_gone_keys(saved: dict[str, Any]) -> dict[str, Any]:
    """A whole configuration that was saved, without the keys that no version has any more."""
    return _without(saved, "")


def _without(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {
        key: _without(value, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in values.items()
        if prefix + key not in _GONE
    }


def with_defaults(saved: dict[str, Any], section: Section) -> dict[str, Any]:
    """A configuration that was saved, and the default of every key that came later.

    What a run does by default is what it did before it could be told otherwise.

    Args:
        saved: of this section, as JSON has it; it may be of an older version.
        section: of now. Where `saved` has a section of another kind, nothing is added there: what
            it lacks came with the kind.
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
