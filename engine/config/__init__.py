"""The configuration of a job."""

from stampede.engine.config.load import load_config, to_yaml
from stampede.engine.config.sections import Config, Precision
from stampede.settings import all_keys

__all__ = ["Config", "Precision", "all_keys", "load_config", "to_yaml"]
