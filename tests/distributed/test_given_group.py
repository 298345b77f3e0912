"""Training in a process group that is there already, as in a worker of Ray Train."""

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist

from stampede.engine.processes import processes
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


@pytest.mark.slow
def test_the_run_is_that_of_a_group_of_its_own(tmp_path):
    found, expected = (run_ranks(2, trained, tmp_path, given) for given in ("given", "own"))
    assert found[0].keys() == expected[0].keys()
    for name, values in expected[0].items():
        np.testing.assert_array_equal(found[0][name], values)


def refused():
    with process_group():
        os.environ["WORLD_SIZE"] = "3"
        with pytest.raises(SettingsError) as refusal, processes("cpu"):
            pass
        return str(refusal.value)


@pytest.mark.slow
def test_an_environment_that_says_otherwise_is_refused():
    found = run_ranks(2, refused)
    assert found[1].startswith("this is rank 1 of 2 in torch's process group, and rank 1 of 3 in")


def test_a_group_for_gpus_only_is_refused(monkeypatch):
    with process_group():
        monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
        said = "'cuda:nccl', which exchanges no CPU tensors"
        with pytest.raises(SettingsError, match=said), processes("cpu"):
            pass
