"""Checked settings from YAML files: typed sections, strict reading, sentences for what is wrong."""

from stampede.settings.errors import SettingsError
from stampede.settings.key_values import from_key_values
from stampede.settings.messages import all_keys, sentences
from stampede.settings.section import Beta, Section, Seed
from stampede.settings.shown import cut, shown
from stampede.settings.yaml_file import parse_yaml, read_yaml

__all__ = [
    "Beta",
    "Section",
    "Seed",
    "SettingsError",
    "all_keys",
    "cut",
    "from_key_values",
    "parse_yaml",
    "read_yaml",
    "sentences",
    "shown",
]
