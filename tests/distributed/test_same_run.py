"""Hosts that would not train the same run are refused before the first step, by name."""

import os
import platform

import pytest

from stampede.data import DataError
from stampede.engine import same_run
from stampede.engine.errors import RunFolderError
from stampede.engine.run import run
from stampede.settings import SettingsError
from support.jobs import SMALL, small_config
from support.ranks import run_ranks
from support.reading import OVERRIDES, prepared

pytestmark = pytest.mark.slow


def refused(folder, job, differs):
    """What a rank on a host of its own, which works in a folder of its own, says of its run."""
    rank = int(os.environ["RANK"])
    platform.node = lambda: ("north", "south")[rank]
    overrides = ["run.dir=runs"]
    if differs == "configuration":
        overrides.append(f"optim.dense.lr={rank + 1}e-3")
    if differs == "source":
        same_run._source_fingerprint = lambda: f"source {rank}"
    here = folder / str(rank)
    here.mkdir(exist_ok=True)
    os.chdir(here if differs in ("folder", "data") else folder)
    if differs == "data":
        overrides += ["data.kind=prepared", "data.path=data", f"run.dir={folder / 'runs'}"]
    config = small_config(here, *overrides, world_size=2, job=job)
    try:
        run(config)
    except (SettingsError, DataError, RunFolderError) as refusal:
        return str(refusal)
    return "not refused"


@pytest.mark.parametrize("differs, said", [
    ("configuration", "optim.dense.lr: found 0.002 for rank 1 on south, and 0.001 for rank 0 on "
                      "north; start all with the same configuration"),
    ("source", "the source of stampede is source 1 for rank 1 on south, and source 0 for rank 0 "
               "on north; install the same everywhere"),
    ("folder", "is not the folder that north, the host of rank 0, has there, and a checkpoint"),
    ("data", "these data differ from those on north, the host of rank 0; mount one folder on all"),
])  # fmt: skip
def test_a_host_that_differs_is_refused(tmp_path, differs, said):
    if differs == "data":
        for rank in range(2):
            (tmp_path / str(rank)).mkdir()
            prepared(tmp_path / str(rank) / "data", train=700 + rank)
    job = OVERRIDES if differs == "data" else SMALL
    # Both ranks raise it; one would print it.
    found = run_ranks(2, refused, tmp_path, job, differs, ranks_per_node=1)
    assert found[0] == found[1] and said in found[0], found
    if differs in ("folder", "data"):
        assert found[0].startswith("on south: ")
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_hosts_that_agree_train(tmp_path):
    assert run_ranks(2, refused, tmp_path, SMALL, "nothing", ranks_per_node=1) == 2 * [
        "not refused"
    ]
