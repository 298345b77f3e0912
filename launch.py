"""Train a model: `torchrun launch.py CONFIG.yaml [section.key=value ...]`; see `--help`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from stampede.engine.quiet import quiet_libraries

quiet_libraries()

from stampede.data import DataError  # noqa: E402
from stampede.engine.command_line import parse_command_line  # noqa: E402
from stampede.engine.errors import (  # noqa: E402
    DoesNotFitError,
    RunFolderError,
    TrainingStoppedError,
)
from stampede.engine.planning.dry_run import print_dry_run  # noqa: E402
from stampede.engine.processes import launched_rank  # noqa: E402
from stampede.engine.run import run  # noqa: E402
from stampede.settings import SettingsError  # noqa: E402


def main() -> int:
    """Run the launcher; returns its exit status: 2 for a user's mistake, 1 for a failed run."""
    try:
        command = parse_command_line(sys.argv[1:], Path(__file__).parent / "configs")
        if command is None:
            return 0
        if command.cluster is None:
            run(command.config)
        elif launched_rank() == 0:
            print_dry_run(command.config, command.cluster, command.plan_out)
    except (SettingsError, DataError, RunFolderError) as mistake:
        return _complain(mistake, 2)
    except (TrainingStoppedError, DoesNotFitError) as stop:
        return _complain(stop, 1)
    except KeyboardInterrupt:
        print("stopped; checkpoint.resume=auto continues from the newest checkpoint")
        return 130
    return 0


def _complain(failure: Exception, status: int) -> int:
    if launched_rank() == 0:
        print(f"error: {failure}", file=sys.stderr, flush=True)
    elif not getattr(failure, "known_to_all_ranks", False):
        print(f"error on rank {launched_rank()}: {failure}", file=sys.stderr, flush=True)
    else:
        # torchrun ends all processes as soon as one does; rank 0 is to speak first.
        time.sleep(2)
    return status


if __name__ == "__main__":
    sys.exit(main())
