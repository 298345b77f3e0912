"""The update's arithmetic on a CPU in C++, compiled when it is first needed."""

from stampede.optim.native.library import available, handles, switched_off

__all__ = ["available", "handles", "switched_off"]
