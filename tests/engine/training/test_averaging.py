"""`train.averaging`: the mean of an epoch's weights takes their place."""

import shutil

import pytest
import torch

from support.jobs import run_small, same_end, tensors_of
from support.ranks import run_ranks

# 8 steps an epoch.
AVERAGED = ["train.averaging=3", "checkpoint.keep=100", "model.normalization=layer"]


def weights(checkpoint):
    return {n: t for n, t in tensors_of(checkpoint).items() if n.startswith("model.")}


@pytest.mark.slow
def test_weights_become_the_mean_of_those_at_evenly_spaced_steps(tmp_path):
    saved = ["checkpoint.every_steps=3", "run.name=each"]
    run_small(tmp_path, [*AVERAGED, "train.averaging=0", *saved])
    run_small(tmp_path, [*AVERAGED, "run.name=mean"])
    steps = [tmp_path / f"each/checkpoints/step_{step:08d}" for step in (3, 6)]
    seen = [weights(folder) for folder in [*steps, tmp_path / "each/checkpoints/epoch_0001"]]
    found = weights(tmp_path / "mean/checkpoints/epoch_0001")
    assert any(not torch.equal(found[name], seen[-1][name]) for name in found)
    for name, mean in found.items():
        expected = torch.stack([one[name].double() for one in seen]).mean(0)
        torch.testing.assert_close(mean.double(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_fewer_than_two_steps_change_nothing(tmp_path):
    for averaging in (0, 1):
        run_small(tmp_path, [f"train.averaging={averaging}", f"run.name=of_{averaging}"])
    same_end(tmp_path / "of_1", tmp_path / "of_0")


@pytest.mark.wide
def test_a_run_continues_within_an_epoch(tmp_path):
    every = [*AVERAGED, "train.epochs=2", "checkpoint.every_steps=5"]
    run_small(tmp_path, [*every, "run.name=whole"])
    # With a part of the mean, and before the next one begins.
    for step in (5, 10):
        parts = tmp_path / f"from_{step}"
        shutil.copytree(tmp_path / "whole", parts)
        later = [f"step_{number:08d}" for number in range(step + 1, 17)]
        for name in [*later, *["epoch_0001"] * (step < 8), "epoch_0002"]:
            shutil.rmtree(parts / "checkpoints" / name, ignore_errors=True)
        run_small(tmp_path, [*every, f"run.name={parts.name}", "checkpoint.resume=auto"])
        same_end(parts, tmp_path / "whole")


@pytest.mark.slow
def test_two_ranks_average_as_one(tmp_path):
    run_small(tmp_path, [*AVERAGED, "train.epochs=2", "run.name=one"])
    both = [*AVERAGED, "train.epochs=2", "run.name=two", "sharding.plan=column_wise"]
    run_ranks(2, run_small, tmp_path, both, 2)
    one, two = (weights(tmp_path / name / "checkpoints/epoch_0002") for name in ("one", "two"))
    for name, expected in one.items():
        torch.testing.assert_close(two[name], expected, rtol=1e-3, atol=1e-5)
