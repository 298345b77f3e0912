"""Every network trains; one with each kind of layer also in bf16, and in two processes."""

import json

import pytest
import torch

from stampede.engine.job.precision import DensePrecision
from stampede.engine.processes import processes
from support.jobs import small_config, train_an_epoch_in
from support.networks import OURS, goals_of
from support.ranks import run_ranks

pytestmark = pytest.mark.slow

LEARNS = ["data.test_rows=2000", "train.batch_size=256"]
FAST = ["data.rows=8000", "optim.embedding.lr=2e-2", "optim.dense.lr=6e-3"]
SHORT = ["data.rows=180", "data.test_rows=100", "train.batch_size=64", "sharding.plan=row_wise"]
# With every kind of layer; those of the other networks are among them.
KINDS = ["autoint", "dcn", "dcnv2", "deepfm", "destine", "dlrm", "esmm", "finalmlp", "fm", "lr",
         "masknet", "ple", "wukong", "xdeepfm"]  # fmt: skip
# Ranks exchange gradients whatever the layers are; deepfm, destine and those of several goals are
# in tests/distributed.
IN_TWO_PROCESSES = [
    "autoint", "dcnv2", "dlrm", "finalmlp", "fm", "lr", "masknet", "wukong", "xdeepfm",
]  # fmt: skip


JOB = [
    "model.dim=4", "model.init_std=1e-2", "data.scale=0.0001", "data.zipf=1.5",
    "model.hidden=[32]", "optim.embedding.lr=1e-2", "optim.dense.lr=3e-3",
    "optim.dense.schedule.warmup=0.1",
]  # fmt: skip
# Defaults that take seconds.
_SMALLER = {
    "xdeepfm": {"cin": [8, 6]},
    "autoint": {"layers": 2, "width": 8},
    "destine": {"layers": 2, "width": 8},
    "wukong": {"layers": 2, "fmb_mlp_units": [32], "bottom": [32], "rank": 4},
}


def train_networks(folder, names, overrides, world_size=1):
    """By name of the network, an epoch on synthetic clicks that can be learned in a second.

    Also as a rank of several.
    """
    # One process group for all: the port of one that was left may still be in use.
    with processes("cpu") as here:
        return {
            name: train_an_epoch_in(
                here,
                small_config(
                    folder,
                    f"model.name={name}",
                    f"data.conversions={bool(goals_of(name))}",
                    f"model.options={json.dumps(_SMALLER.get(name, {}))}",
                    *JOB,
                    *overrides,
                    world_size=world_size,
                ),
            )
            for name in names
        }


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", OURS)
def test_it_learns(name, tmp_path):
    # Layer norm makes rare ids' vectors as large as all others, so that Wukong learns later.
    rows = ["data.rows=48000"] if name == "wukong" else FAST
    done = train_networks(tmp_path, [name], [*LEARNS, *rows])
    # Of 2000 samples, chance is within 0.03 of 0.5.
    assert done[name].evaluation["auc"] > 0.55


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Short trainings in one process."""
    return train_networks(tmp_path_factory.mktemp("alone"), KINDS, SHORT)


@pytest.mark.wide
def test_two_processes_give_the_weights_of_one(alone, tmp_path):
    found = run_ranks(2, train_networks, tmp_path, IN_TWO_PROCESSES, SHORT, 2)
    for rank, of_rank in enumerate(found):
        assert list(of_rank) == IN_TWO_PROCESSES
        for name, other in of_rank.items():
            one, which = alone[name], f"{name} rank {rank}"
            assert other.losses == pytest.approx(one.losses, rel=1e-5), which
            for key, weight in one.dense.items():
                torch.testing.assert_close(
                    other.dense[key], weight, rtol=1e-3, atol=1e-5, msg=f"{which} {key}"
                )


@pytest.mark.wide
def test_bf16(alone, tmp_path, monkeypatch):
    # A CPU without instructions for it would not choose it.
    monkeypatch.setattr(
        "stampede.engine.job.build.choose_precision", lambda *_: DensePrecision(True, "bf16")
    )
    rounded = train_networks(tmp_path, KINDS, SHORT)
    for name, exact in alone.items():
        found = rounded[name]
        assert found.losses == pytest.approx(exact.losses, rel=0.1), name
        has_products = any(weight.ndim > 1 for weight in exact.dense.values())
        assert (found.losses != exact.losses) == has_products, name
        assert all(weight.dtype == torch.float32 for weight in found.dense.values())
