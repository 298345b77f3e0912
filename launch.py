"""Train a model: `torchrun launch.py CONFIG.yaml [section.key=value ...]`; see `--help`."""

from __future__ import annotations

import sys
from pathlib import Path

from stampede.engine.allocator import keep_freed_memory
from stampede.engine.quiet import quiet_libraries

quiet_libraries()
keep_freed_memory()

from stampede.engine.command_line import parse_command_line  # noqa: E402
from stampede.engine.exit_status import exit_status  # noqa: E402
from stampede.engine.planning.dry_run import print_dry_run  # noqa: E402
from stampede.engine.processes import launched_rank  # noqa: E402
from stampede.engine.run import run  # noqa: E402


def main() -> int:
    """Run the launcher; returns its exit status: 2 for a user's mistake, 1 for a failed run."""
    return exit_status(_launch)


def _launch() -> None:
    command = parse_command_line(sys.argv[1:], Path(__file__).parent / "configs")
    if command is None:
        return
    if command.cluster is None:
        run(command.config)
    elif launched_rank() == 0:
        print_dry_run(command.config, command.cluster, command.plan_out)


if __name__ == "__main__":
    sys.exit(main())
