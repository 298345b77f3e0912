"""`launch.py` with little memory: `short_of_memory.py BYTES CONFIG.yaml ...`.

The process may have so many bytes of addresses more than it has when its libraries are loaded.
"""

import resource
import runpy
import sys
from pathlib import Path

import stampede.engine.run  # noqa: F401


def main():
    more = int(sys.argv.pop(1))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    launch = Path(__file__).parents[2] / "launch.py"
    sys.argv[0] = str(launch)
    runpy.run_path(str(launch), run_name="__main__")


if __name__ == "__main__":
    main()
