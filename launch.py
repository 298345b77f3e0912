"""Train a model: `python launch.py CONFIG.yaml [section.key=value ...]`; see `--help`."""

from __future__ import annotations

from stampede.engine.cli import main
from stampede.engine.start_up import as_process

if __name__ == "__main__":
    as_process(main)
