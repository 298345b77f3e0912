"""`launch.py` that tells where it is: `watched_launch.py FOLDER CONFIG.yaml ...`."""

import os
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.paths import ROOT
from support.soak.places import telling


def main():
    folder = Path(sys.argv.pop(1))
    sys.argv[0] = str(ROOT / "launch.py")
    with telling(folder / os.environ["RANK"]):
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
