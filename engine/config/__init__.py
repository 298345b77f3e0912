"""The configuration of a job."""

from stampede.engine.config.defaults import with_defaults
from stampede.engine.config.load import load_config, to_yaml
from stampede.engine.config.sections import Config, config_type
from stampede.settings import all_keys

__all__ = ["Config", "all_keys", "config_type", "load_config", "to_yaml", "with_defaults"]
