# pyright: basic
"""The exit status of a command that trains nothing; of a run: `engine/exit_status.py`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from stampede.data.errors import DataError
from stampede.settings import SettingsError, printable
from stampede.stores import StoreError


def exit_status(action: Callable[[], None], *mistakes: type[Exception]) -> int:
    """Run a command and return its exit status.

    0; 2 for a user's mistake, one of `mistakes` or of this room's, with a sentence; 130 after
    Ctrl-C; 141, as after SIGPIPE, if the reader of the output has closed it.
    """
    try:
        action()
        sys.stdout.flush()
    except (DataError, SettingsError, StoreError, *mistakes) as mistake:
        print(f"error: {printable(str(mistake))}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe. Keep Python from complaining at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("stopped; no unfinished files were left", file=sys.stderr)
        return 130
    return 0
