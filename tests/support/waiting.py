"""Waiting for what another thread or process does."""

import time

# Seconds after which a test gives something up for hung. It ends a hang and measures nothing: the
# machine may be so busy that what takes seconds takes many minutes.
HANG = 1800


def wait_for(found, seconds=HANG):
    """What `found` returns, as soon as it is true, and after so many seconds whatever it is."""
    deadline = time.monotonic() + seconds
    while not (value := found()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return value
