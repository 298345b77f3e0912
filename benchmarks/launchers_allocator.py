"""Sets this process's allocator as the launcher does; import it before torch."""

from stampede.engine.start_up import keep_freed_memory

keep_freed_memory()
