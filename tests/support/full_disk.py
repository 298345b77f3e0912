"""A disk that is full, as far as that can be had without one."""

import resource
from contextlib import contextmanager


@contextmanager
def files_of_at_most(count):
    """No file of this process can grow beyond so many bytes; who tries gets an OSError."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
