"""Train a model: `python launch.py CONFIG.yaml [section.key=value ...]`; see `--help`."""

from __future__ import annotations

import sys

from stampede.engine.cli import main

if __name__ == "__main__":
    sys.exit(main())
