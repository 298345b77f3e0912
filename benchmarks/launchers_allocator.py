"""Sets this process's allocator as the launcher does; to be imported before torch."""

from stampede.engine.allocator import keep_freed_memory

keep_freed_memory()
