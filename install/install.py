# ruff: noqa: ANN001, ANN201
"""Set up .venv for this checkout; `make setup` runs it.

This file keeps to syntax that any Python can read, so that one that is too old gets a sentence
instead of a SyntaxError. The work is done in environment.py.
"""

import os
import sys

OLDEST, NEWEST = (3, 10), (3, 13)


def complaint_about(version):
    """Return the sentence for a Python this project cannot use, or None."""
    if OLDEST <= tuple(version[:2]) <= NEWEST:
        return None
    return (
        "error: this is Python "
        + ".".join(str(part) for part in version[:3])
        + ", but Python 3.10 to 3.13 is needed: name one, as in `PYTHON=python3.12 make setup`"
    )


def main():
    """Set up the environment; returns the exit status."""
    complaint = complaint_about(sys.version_info)
    if complaint:
        sys.stderr.write(complaint + "\n")
        return 1
    from environment import main as set_up_environment

    return set_up_environment(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


if __name__ == "__main__":
    sys.exit(main())
