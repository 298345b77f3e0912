"""The update's arithmetic on a CPU in C++, compiled when it is first needed."""

from pathlib import Path

from stampede.native import Library, switched_off

_ROWS = Library(Path(__file__).with_name("rows.cpp"))
available, handles = _ROWS.available, _ROWS.handles

__all__ = ["available", "handles", "switched_off"]
