import sys

import pytest

from support.paths import ROOT

# The benchmarks are scripts, which find each other in their own folder.
sys.path.insert(0, str(ROOT / "benchmarks"))


@pytest.fixture(scope="session")
def clicks(tmp_path_factory):
    """A prepared folder with 5 tables."""
    from clicks import write_clicks

    return write_clicks(tmp_path_factory.mktemp("clicks"), rows=2048, ids=4000, fields=5)
