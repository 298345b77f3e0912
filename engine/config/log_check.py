"""Refuses a log that cannot be read as configured, without torch, which takes seconds to import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stampede import stores
from stampede.engine.config import Config, check_goals
from stampede.engine.config.data import PreparedSection, RawSection
from stampede.settings import SettingsError

if TYPE_CHECKING:
    from stampede.data.sources import Source


def check_log(config: Config) -> None:
    """Check that the files of a log are there, and what is said of its columns.

    Files in a store are not asked for twice.

    Raises:
        DataError, SettingsError: what is wrong.
    """
    section = config.data
    if isinstance(section, RawSection | PreparedSection):
        section.check_path()
    if isinstance(section, RawSection) and not any(map(stores.is_url, section.paths())):
        check_columns(config, section.source())


def check_columns(config: Config, source: Source) -> None:
    """Check what is said of the columns of a log."""
    schema = source.log.schema
    multi = {name: field.separator is not None for name, field in schema.ids.items()}
    check_groups(config.evaluate.group_by, multi)
    check_goals(config, schema.goals)


def check_groups(group_by: str, multi: Mapping[str, bool]) -> None:
    """`multi` says of each id field whether a sample may have several ids."""
    single = [name for name, has_several in multi.items() if not has_several]
    if group_by and group_by not in single:
        found = "a field of several ids" if group_by in multi else "not an id field"
        raise SettingsError(
            f"evaluate.group_by: {group_by!r} is {found}; write one of {', '.join(single)}"
        )
