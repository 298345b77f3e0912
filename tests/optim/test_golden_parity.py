"""The authors' TensorFlow code is followed step by step."""

from dataclasses import replace

import pytest
import torch

from stampede.optim import CowClipTables, DenseAdam, native
from stampede.optim.backends.torch import TorchBackend
from stampede.optim.rules import Adam
from stampede.optim.sharded.supported import SHARDING_TYPES
from stampede.optim.table_array import TableArray
from support.golden import (
    TOLERANCE,
    Golden,
    largest_count,
    train_with_the_engine,
    worst,
)
from support.paths import shared


def golden_file(name):
    return shared(f"golden/largebatchctr_{name}.npz")


@pytest.fixture
def column_offsets(monkeypatch):
    """First columns of all shards that are built."""
    found = set()
    create = TableArray.create

    def spy(shards, *arguments):
        found.update(shard.column_offset for shard in shards)
        return create(shards, *arguments)

    monkeypatch.setattr(TableArray, "create", spy)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, plan",
    [*(("deepfm", plan) for plan in SHARDING_TYPES), ("deepfm_bound", "row_wise"),
     ("deepfm_bound", "column_wise")],
)  # fmt: skip
def test_through_torchrec(name, plan, column_offsets):
    path = golden_file(name)
    trajectory = train_with_the_engine(path, f"sharding.plan={plan}")
    assert trajectory.plan == {plan}
    assert (len(column_offsets) > 1) == ("column" in plan or plan == "grid_shard")
    assert worst(Golden(path), trajectory) < TOLERANCE


def test_batches_exercise_the_clip():
    path = golden_file("deepfm")
    trajectory = train_with_the_engine(path)
    assert 0.2 < trajectory.clipped / trajectory.touched < 0.8
    assert largest_count(Golden(path)) > 3


def test_fails_with_counts_forced_to_one(monkeypatch):
    row_gradients = CowClipTables.row_gradients

    def counts_of_one(*arguments):
        return [
            summed._replace(counts=torch.ones_like(summed.counts))
            for summed in row_gradients(*arguments)
        ]

    monkeypatch.setattr(CowClipTables, "row_gradients", counts_of_one)
    assert_deviates()


def test_fails_without_clip():
    assert_deviates("optim.embedding.clip=null")


def test_fails_with_l2_outside_the_clip(monkeypatch):
    l2 = Golden(golden_file("deepfm")).meta["l2"]
    measure, step_ = TorchBackend.measure, Adam.step_

    def without_l2(self, batch):
        array = replace(self.array, settings=replace(self.array.settings, l2=0.0))
        return measure(TorchBackend(array), batch)

    def step_with_l2(self, rows):
        step_(self, rows._replace(grads=rows.grads.add_(rows.weights, alpha=2 * l2)))

    # The rows of the batch get their L2 term after the clip, all others as ever.
    monkeypatch.setattr(TorchBackend, "measure", without_l2)
    monkeypatch.setattr(Adam, "step_", step_with_l2)
    with native.switched_off():
        assert_deviates()


def test_fails_with_the_other_eps_placement():
    assert_deviates("optim.embedding.eps_placement=torch")
    assert_deviates("optim.dense.eps_placement=torch")


@pytest.mark.parametrize(
    "override",
    [
        "optim.embedding.rows=touched",
        "optim.embedding.betas=[0.9,0.99]",
        "optim.embedding.eps=1e-5",
        "optim.embedding.clip.ratio=0.9",
        "optim.dense.betas=[0.9,0.99]",
        "optim.dense.eps=1e-5",
        "optim.dense.lr=7e-4",
    ],
)
def test_every_setting_of_the_configuration_reaches_the_optimizers(override):
    assert_deviates(override)


def test_the_bound_and_its_variant_reach_the_clip():
    path = golden_file("deepfm_bound")
    bare = train_with_the_engine(path, "optim.embedding.clip.bound=1e-5")
    assert worst(Golden(path), bare) > TOLERANCE
    # The reference multiplies the bound by sqrt(10), so it clips fewer rows.
    one, other = (
        train_with_the_engine(
            path, "optim.embedding.clip.bound=1e-3", f"optim.embedding.clip.variant={variant}"
        )
        for variant in ("reference", "paper")
    )
    assert one.clipped < other.clipped


def test_the_numbers_first_order_weights_decay_with_the_tables_l2(monkeypatch):
    add = DenseAdam.add_param_group
    monkeypatch.setattr(
        DenseAdam, "add_param_group", lambda self, group: add(self, {**group, "l2": 0.0})
    )
    path = golden_file("deepfm_bound")
    assert worst(Golden(path), train_with_the_engine(path)) > TOLERANCE


def assert_deviates(*overrides):
    path = golden_file("deepfm")
    assert worst(Golden(path), train_with_the_engine(path, *overrides)) > TOLERANCE
