"""Files that are not what they were."""

import os
import shutil
from contextlib import contextmanager

DAMAGES = ("truncated", "flipped", "vanished")


def damage(path, how, draw):
    """Cut a file at a random place, flip one of its bits, or delete it."""
    if how == "vanished":
        path.unlink()
        return
    content = bytearray(path.read_bytes())
    at = draw.randrange(len(content))
    if how == "truncated":
        del content[at:]
    else:
        content[at] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


@contextmanager
def mended(folder):
    """What happens to a folder within it is undone after it, times included."""
    aside = folder.with_name(f"{folder.name} as it was")
    shutil.copytree(folder, aside)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(aside, folder)
