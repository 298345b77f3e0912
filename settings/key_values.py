"""Settings given on a command line as `key=value`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from stampede.settings.errors import SettingsError
from stampede.settings.messages import sentences
from stampede.settings.section import Section
from stampede.settings.shown import shown
from stampede.settings.yaml_file import parse_yaml

Model = TypeVar("Model", bound=Section)


def from_key_values(given: Sequence[str], model: type[Model], option: str) -> Model:
    """Checked settings.

    Args:
        given: `key=value` each, the value in YAML.
        model: which settings there are.
        option: of the command line that they were given with, such as `--set`.

    Raises:
        SettingsError: what is wrong, and what to write instead.
    """
    values: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise SettingsError(f"{option} {shown(text)}: write KEY=VALUE, such as split=random")
        values[key] = parse_yaml(value, f"{option} {shown(text)}")
    try:
        return model.model_validate(values)
    except ValidationError as failure:
        raise SettingsError(f"{option}:\n" + "\n".join(sentences(failure, model))) from None
