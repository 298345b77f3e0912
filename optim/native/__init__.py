"""The update's arithmetic on a CPU in C++, compiled when it is first needed."""

from pathlib import Path

from stampede.native import Library, switched_off

_HERE = Path(__file__).parent
_ROWS = Library(_HERE / "rows.cpp", _HERE / "adam.cpp", headers=[_HERE / "lookup.h"])
available, handles = _ROWS.available, _ROWS.handles

__all__ = ["available", "handles", "switched_off"]
