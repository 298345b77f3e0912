"""Training in a process group that is there already, as in a worker of Ray Train."""

import os
import platform

import numpy as np
import pytest
import torch
import torch.distributed as dist

from stampede.engine.processes import STORE_FILE, processes
from stampede.engine.run import run
from stampede.settings import SettingsError
from support.jobs import small_config, tensors_of
from support.ranks import process_group, run_ranks


def trained(folder, given):
    """Weights of a run; in a group of our own, or of the second of two in one that is `given`."""
    config = small_config(folder, f"run.name={given}", "run.overwrite=true", world_size=2)
    if given == "own":
        run(config)
    else:
        with process_group():
            run(config)
            run(config)
            # It is left as it was.
            total = torch.ones(())
            dist.all_reduce(total)
            assert total == 2
    return tensors_of(folder / given / "checkpoints/epoch_0001")


@pytest.mark.wide
def test_the_run_is_that_of_a_group_of_its_own(tmp_path):
    found, expected = (run_ranks(2, trained, tmp_path, given) for given in ("given", "own"))
    assert found[0].keys() == expected[0].keys()
    for name, values in expected[0].items():
        np.testing.assert_array_equal(found[0][name], values)


def refused(changed):
    """What a rank says of an environment that differs from the group's own."""
    with process_group():
        for name in changed:
            del os.environ[name]
        os.environ |= {name: value for name, value in changed.items() if value}
        with pytest.raises(SettingsError) as refusal, processes("cpu"):
            pass
        return str(refusal.value)


@pytest.mark.slow
@pytest.mark.parametrize("changed, said", [
    ({"WORLD_SIZE": "3"}, "this is rank 1 of 2 in torch's process group, and rank 1 of 3 in"),
    # As of a group that was made with init_method="tcp://...".
    ({STORE_FILE: ""}, "the environment does not say where the store of torch's process group is"),
])  # fmt: skip
def test_an_environment_that_says_otherwise_is_refused(changed, said):
    found = run_ranks(2, refused, changed)
    assert found[1].startswith(said) and "LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT" in found[1]


def refused_on(hosts, per_host):
    """What a rank on one of several hosts says, which takes so many ranks to be on it."""
    rank = int(os.environ["RANK"])
    platform.node = lambda: hosts[rank]
    del os.environ["LOCAL_WORLD_SIZE"]
    if per_host[rank]:
        os.environ["LOCAL_WORLD_SIZE"] = str(per_host[rank])
    with process_group(), pytest.raises(SettingsError) as refusal, processes("cpu"):
        pass
    return str(refusal.value)


@pytest.mark.slow
@pytest.mark.parametrize("hosts, per_host, said", [
    (("north", "south", "south"), (1, 2, 2), "LOCAL_WORLD_SIZE: found 2 for rank 1 on south, and "
     "1 for rank 0 on north; start as many processes on each host"),
    (("north", "north", "south"), (0, 0, 0), "rank 0 on north and rank 2 on south count as "
     "processes of one host; set LOCAL_WORLD_SIZE to the number of processes on each host"),
])  # fmt: skip
def test_ranks_that_are_not_spread_evenly_over_hosts_are_refused(hosts, per_host, said):
    found = run_ranks(3, refused_on, hosts, per_host)
    assert found[0] == found[1] == found[2] and found[0].startswith(said), found


def test_a_group_for_gpus_only_is_refused(monkeypatch):
    with process_group():
        monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
        said = "'cuda:nccl', which exchanges no CPU tensors"
        with pytest.raises(SettingsError, match=said), processes("cpu"):
            pass
