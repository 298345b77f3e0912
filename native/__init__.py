"""C++ that is compiled when it is first needed."""

from stampede.native.library import Library, switched_off

__all__ = ["Library", "switched_off"]
