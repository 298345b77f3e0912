"""Sets this process's allocator as the launcher does; to be imported before torch."""

from stampede.engine.start_up import keep_freed_memory

keep_freed_memory()
