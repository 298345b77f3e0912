"""The command `stampede`, also as `python -m stampede` and `torchrun -m stampede`."""

from __future__ import annotations

from typing import NoReturn

from stampede.engine.cli import stampede
from stampede.engine.start_up import as_process


def main() -> NoReturn:
    """Run the command that `sys.argv` names."""
    as_process(stampede)


if __name__ == "__main__":
    main()
