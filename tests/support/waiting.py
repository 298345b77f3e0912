"""Waiting for what another thread or process does."""

import time


def wait_for(found, seconds=20):
    """What `found` returns, as soon as it is true, and after so many seconds whatever it is."""
    deadline = time.monotonic() + seconds
    while not (value := found()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return value
