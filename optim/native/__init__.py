"""The update's arithmetic on a CPU in C++, compiled when it is first needed."""

from pathlib import Path

from stampede.native_library import Library, switched_off

_HERE = Path(__file__).parent
_ROWS = Library(
    *(_HERE / name for name in ("rows.cpp", "adam.cpp", "missed.cpp")),
    headers=[_HERE / name for name in ("lookup.h", "adam.h")],
)
available, handles = _ROWS.available, _ROWS.handles

__all__ = ["available", "handles", "switched_off"]
