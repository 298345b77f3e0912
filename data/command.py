"""What the commands of this folder have in common."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from stampede.data.errors import DataError
from stampede.settings import SettingsError


def exit_status(action: Callable[[], None], *mistakes: type[Exception]) -> int:
    """Run a command; 2 and a sentence for a user's mistake, 130 for an interrupt, else 0.

    141, as of SIGPIPE, where nobody reads the output to its end.

    Args:
        mistakes: errors besides `DataError` and `SettingsError` that are the user's to mend.
    """
    try:
        action()
        sys.stdout.flush()
    except (DataError, SettingsError, *mistakes) as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever reads, as `head` does, has enough. What is still kept goes nowhere, so that
        # Python has nothing to complain of at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("stopped; nothing half-written was left", file=sys.stderr)
        return 130
    return 0
