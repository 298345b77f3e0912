"""The authors' TensorFlow code is followed step by step."""

import numpy as np
import pytest

from stampede.optim.sharded.supported import SHARDING_TYPES
from support.golden import (
    TOLERANCE,
    Golden,
    golden_file,
    train_with_the_engine,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, plan",
    [*(("deepfm", plan) for plan in SHARDING_TYPES), ("deepfm_bound", "row_wise"),
     ("deepfm_bound", "column_wise")],
)  # fmt: skip
def test_through_torchrec(name, plan):
    path = golden_file(name)
    trajectory = train_with_the_engine(path, f"sharding.plan={plan}")
    assert trajectory.plan == {plan}
    assert (len(trajectory.first_columns) > 1) == ("column" in plan or plan == "grid_shard")
    assert trajectory.worst < TOLERANCE


def test_batches_exercise_the_clip():
    path = golden_file("deepfm")
    trajectory = train_with_the_engine(path)
    assert 0.2 < trajectory.clipped / trajectory.touched < 0.8
    # How often the most frequent id of any batch occurs in it.
    golden = Golden(path)
    batches = [golden.batch(step)[0].numpy() for step in range(1, golden.meta["steps"] + 1)]
    counts = [np.unique(ids, return_counts=True)[1] for batch in batches for ids in batch.T]
    assert max(map(max, counts)) > 3


@pytest.mark.parametrize(
    "override",
    [
        "optim.embedding.clip=null",
        "optim.embedding.eps_placement=torch",
        "optim.dense.eps_placement=torch",
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
    path = golden_file("deepfm")
    assert train_with_the_engine(path, override).worst > TOLERANCE


def test_the_bound_and_its_variant_reach_the_clip():
    path, clip = golden_file("deepfm_bound"), "optim.embedding.clip"
    bare = train_with_the_engine(path, f"{clip}.bound=1e-5")
    assert bare.worst > TOLERANCE
    # The reference multiplies the bound by sqrt(10), so it clips fewer rows.
    reference, paper = (
        train_with_the_engine(path, f"{clip}.bound=1e-3", f"{clip}.variant={variant}")
        for variant in ("reference", "paper")
    )
    assert reference.clipped < paper.clipped
