"""What the commands of this folder have in common."""

from __future__ import annotations

import sys
from collections.abc import Callable

from stampede.data.errors import DataError
from stampede.settings import SettingsError


def exit_status(action: Callable[[], None], *mistakes: type[Exception]) -> int:
    """Run a command; 2 and a sentence for a user's mistake, 130 for an interrupt, else 0.

    Args:
        mistakes: errors besides `DataError` and `SettingsError` that are the user's to mend.
    """
    try:
        action()
    except (DataError, SettingsError, *mistakes) as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; nothing half-written was left", file=sys.stderr)
        return 130
    return 0
