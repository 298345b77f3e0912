"""The configuration of a job."""

from stampede.engine.config.defaults import with_defaults, without_gone_keys
from stampede.engine.config.load import (
    check_config,
    load_config,
    load_config_of_run,
    set_key,
    to_yaml,
)
from stampede.engine.config.sections import Config, config_type
from stampede.settings import all_keys

__all__ = [
    "Config",
    "all_keys",
    "check_config",
    "config_type",
    "load_config",
    "load_config_of_run",
    "set_key",
    "to_yaml",
    "with_defaults",
    "without_gone_keys",
]
