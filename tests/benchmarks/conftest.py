import sys

from support.paths import ROOT

# The benchmarks are scripts, which find each other in their own folder.
sys.path.insert(0, str(ROOT / "benchmarks"))
