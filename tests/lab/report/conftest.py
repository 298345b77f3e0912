"""Runs that the tests of this folder share and do not change."""

import pytest

from stampede.lab.report.records import open_runs
from support.jobs import run_small


@pytest.fixture(scope="package")
def run_folders(tmp_path_factory):
    """A folder with runs of two batch sizes."""
    folder = tmp_path_factory.mktemp("runs")
    for size in (256, 512):
        names = [f"run.name=b{size}", f"train.batch_size={size}"]
        run_small(folder, [*names, "train.epochs=2", "evaluate.every=2"])
    return folder


@pytest.fixture(scope="package")
def runs(run_folders):
    return open_runs([run_folders])
