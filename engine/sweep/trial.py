"""One trial, in a process that ends with the sweep's: `CONFIG.yaml [section.key=value ...]`."""

from __future__ import annotations

import os
import stat
import sys
import threading
from pathlib import Path

from stampede.engine.start_up import quiet_libraries, stay_on_this_machine

quiet_libraries()
stay_on_this_machine()

from stampede.engine.config.load import load_config  # noqa: E402
from stampede.engine.errors import STOPPED, exit_status  # noqa: E402
from stampede.engine.run import run  # noqa: E402
from stampede.engine.start_up import launched_world_size  # noqa: E402


def main() -> int:
    """Train; returns the exit status, as the launcher does."""
    if stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
        threading.Thread(target=_end_with_the_sweep, daemon=True).start()
    path, *overrides = sys.argv[1:]
    return exit_status(lambda: run(load_config(Path(path), overrides, launched_world_size())))


def _end_with_the_sweep() -> None:
    # The sweep holds the other end of the pipe, which closes however the sweep dies.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(STOPPED)


if __name__ == "__main__":
    sys.exit(main())
