"""YAML files of users, read strictly."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from stampede.settings.errors import SettingsError
from stampede.settings.shown import cut

# The largest configuration that is shipped has 2 KB; PyYAML takes seconds for a megabyte.
_MOST_BYTES = 1 << 20

# What aliases stand for counts as often as they stand there.
_MOST_VALUES = 100_000


def read_yaml(path: Path, hint: str) -> dict[str, Any]:
    """The sections of a YAML file.

    Args:
        hint: what to do where there is no such file.

    Raises:
        SettingsError: it cannot be read, or has no sections.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        text = content.decode("utf-8")
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such file; {hint}") from None
    except (OSError, ValueError) as failure:
        raise SettingsError(f"{path}: cannot be read as text ({_reason(failure)})") from None
    if len(content) > _MOST_BYTES:
        raise SettingsError(
            f"{path}: is longer than {_MOST_BYTES:,} bytes, which no such file needs; write "
            "the path of another"
        )
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

    def get_single_node(self) -> yaml.Node | None:
        """The document, of a size that can be worked with."""
        node = super().get_single_node()
        if node is not None and _values(node, {}) > _MOST_VALUES:
            raise SettingsError(f"its aliases stand for more than {_MOST_VALUES:,} values")
        return node


def _values(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Values that a node stands for, those of aliases as often as they stand there."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = None
        children = node.value
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        known[id(node)] = 1 + sum(_values(child, known) for child in children)
    count = known[id(node)]
    if count is None:
        line = node.start_mark.line + 1
        raise SettingsError(f"line {line}: found an alias within what it stands for; leave it out")
    return count


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


# A terminal, a path or a file cannot take them; YAML writes them as "\\0" and "\\ud800".
_UNUSABLE = re.compile("[\0\ud800-\udfff]")


def _text(loader: _Loader, node: yaml.ScalarNode) -> str:
    text = loader.construct_scalar(node)
    unusable = _UNUSABLE.search(text)
    if unusable:
        line = node.start_mark.line + 1
        raise SettingsError(f"line {line}: found the character {unusable[0]!a}; leave it out")
    return text


def _whole(loader: _Loader, node: yaml.ScalarNode) -> int:
    number = loader.construct_yaml_int(node)
    # Beyond it no float holds it, and Python does not even print it.
    if number.bit_length() > 1023:
        raise SettingsError(f"line {node.start_mark.line + 1}: found a number of too many digits")
    return number


_Loader.add_constructor("tag:yaml.org,2002:str", _text)
_Loader.add_constructor("tag:yaml.org,2002:int", _whole)


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
    # Its constructors raise whatever they stumble over: KeyError for `!!bool x`.
    except Exception as failure:
        mark = getattr(failure, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise SettingsError(f"{where}{line}: not valid YAML: {_reason(failure)}") from None


def _reason(failure: Exception) -> str:
    """One line."""
    said = getattr(failure, "problem", None) or str(failure)
    return cut((said.splitlines() or [type(failure).__name__])[0])
