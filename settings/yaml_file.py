"""YAML files of users, read strictly."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from stampede.settings.errors import SettingsError


def read_yaml(path: Path, hint: str) -> dict[str, Any]:
    """The sections of a YAML file.

    Args:
        hint: what to do where there is no such file.

    Raises:
        SettingsError: it cannot be read, or has no sections.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such file; {hint}") from None
    except (OSError, UnicodeDecodeError) as failure:
        raise SettingsError(f"{path}: cannot be read as text ({failure})") from None
    values = parse_yaml(text, str(path))
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise SettingsError(
            f"{path}: found {type(values).__name__}, expected sections such as `train:` with keys"
        )
    return values


class _Loader(yaml.SafeLoader):
    """Safe YAML that takes for a number what looks like one, and refuses a key that stands twice.

    YAML 1.1 reads 010 as 8, 12:00 as 720 and 2024-03-01 as a date: here they are text. It wants a
    dot in 1e-4: here that is a number.
    """


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_DIGITS = list("-+.0123456789")
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9]\d*)$"), _DIGITS)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^([-+]?((\d+\.\d*|\.\d+)([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(inf|Inf|INF))"
        r"|\.(nan|NaN|NAN))$"
    ),
    _DIGITS,
)


def _mapping_without_repeats(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    seen: dict[str, int] = {}
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if not isinstance(key, str):
            raise SettingsError(f"line {line}: found the key {key!r}, expected a name")
        if key in seen:
            raise SettingsError(
                f"key {key!r} stands on line {seen[key]} and again on line {line}; keep one"
            )
        seen[key] = line
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_repeats)


def parse_yaml(text: str, where: str) -> Any:
    """A YAML text that came from `where`, a file or an override.

    Raises:
        SettingsError: it is no YAML, or has a key twice.
    """
    try:
        return yaml.load(text, _Loader)
    except SettingsError as failure:
        raise SettingsError(f"{where}: {failure}") from None
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as failure:
        problem = getattr(failure, "problem", None) or str(failure).splitlines()[0]
        mark = getattr(failure, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise SettingsError(f"{where}{line}: not valid YAML: {problem}") from None
