"""The configuration of a job."""

from stampede.engine.config.load import load_config, to_yaml
from stampede.engine.config.messages import key_paths
from stampede.engine.config.sections import Config

__all__ = ["Config", "key_paths", "load_config", "to_yaml"]
