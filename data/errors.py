"""What is wrong with a user's data, and the exit status of a command that meets it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Literal

from stampede.settings import SettingsError, printable

# What happens to a row that cannot be read: `skip` leaves it out and writes it aside.
OnBadRow = Literal["error", "skip"]


class DataError(Exception):
    """A data file that cannot be used; the message names the file, the place and the remedy."""


def exit_status(action: Callable[[], None], *mistakes: type[Exception]) -> int:
    """Run a command: 0, 2 and a sentence for a user's mistake, 130 for an interrupt.

    141, as after SIGPIPE, where nobody reads the output to its end.

    Args:
        mistakes: errors besides `DataError` and `SettingsError` that are the user's to mend.
    """
    try:
        action()
        sys.stdout.flush()
    except (DataError, SettingsError, *mistakes) as mistake:
        print(f"error: {printable(str(mistake))}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader, such as `head`, has enough. Python must not complain of the rest at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("stopped; nothing half-written was left", file=sys.stderr)
        return 130
    return 0
