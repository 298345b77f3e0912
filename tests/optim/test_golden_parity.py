"""The authors' TensorFlow code is followed step by step."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import stampede.optim.fused_tables as fused_tables
import stampede.optim.update as update
from stampede.models import NetworkShape
from stampede.models.deepfm import DeepFM
from stampede.optim import CowClipAdam, DenseAdam
from stampede.optim.clip import clip_rows_
from support.golden import (
    CHECKED_STEPS,
    TOLERANCE,
    Golden,
    Trajectory,
    largest_count,
    train_with_the_engine,
    worst,
)
from support.paths import shared

FILES = ("deepfm", "deepfm_bound")


def golden_file(name):
    return shared(f"golden/largebatchctr_{name}.npz")


@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise"])
@pytest.mark.parametrize("name", FILES)
def test_through_torchrec(name, sharding_type):
    path = golden_file(name)
    trajectory = train_with_the_engine(path, f"sharding.plan={sharding_type}")
    assert trajectory.plan == {sharding_type}
    assert worst(Golden(path), trajectory) < TOLERANCE


def test_batches_exercise_the_clip():
    path = golden_file("deepfm")
    trajectory = train_with_the_engine(path)
    assert 0.2 < trajectory.clipped / trajectory.touched < 0.8
    assert largest_count(Golden(path)) > 3


@pytest.mark.parametrize("name", FILES)
def test_as_a_plain_torch_optimizer(name):
    golden = Golden(golden_file(name))
    assert worst(golden, train_plain(golden)) < TOLERANCE


def test_fails_with_counts_forced_to_one(monkeypatch):
    sum_by_row = fused_tables.sum_by_row

    def counts_of_one(*arguments):
        summed = sum_by_row(*arguments)
        return summed._replace(counts=torch.ones_like(summed.counts))

    monkeypatch.setattr(fused_tables, "sum_by_row", counts_of_one)
    assert_deviates()


def test_fails_without_clip():
    assert_deviates("optim.embedding.clip=null")


def test_fails_with_l2_outside_the_clip(monkeypatch):
    l2 = Golden(golden_file("deepfm")).meta["l2"]

    def clip_before_l2(grads, weights, counts, clip):
        # `grads` holds 2*l2*w already: take it out, clip, put it back.
        grads -= 2 * l2 * weights
        over = clip_rows_(grads, weights, counts, clip)
        grads += 2 * l2 * weights
        return over

    monkeypatch.setattr(update, "clip_rows_", clip_before_l2)
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


def train_plain(golden: Golden) -> Trajectory:
    """The same model in plain PyTorch, with sparse `nn.Embedding` tables."""
    start = golden.weights(0)
    names = list(golden.vocabulary)
    tables = {
        key: nn.Embedding.from_pretrained(start[key].clone(), freeze=False, sparse=True)
        for key in start
        if key[0] != "dense"
    }
    shape = NetworkShape(len(names), 10, golden.meta["dense"], tuple(golden.hidden))
    network = DeepFM(shape, torch.Generator())
    dense = {
        name: nn.Parameter(weight.clone()) for (kind, name), weight in start.items()
        if kind == "dense"
    }  # fmt: skip
    for name, parameter in list(network.mlp.named_parameters()):
        layer, attribute = name.split(".")
        setattr(network.mlp[int(layer)], attribute, dense[f"network.mlp.{name}"])
        assert parameter.shape == dense[f"network.mlp.{name}"].shape
    embedding_optimizer = CowClipAdam(
        [
            {"params": [tables["embedding", n].weight for n in names]},
            {"params": [tables["first_order", n].weight for n in names], "clip": None},
        ],
        lr=golden.meta["lr_embed"],
        l2=golden.meta["l2"],
        clip=golden.clip(),
    )
    decayed = dense["number_weights.weight"]
    dense_optimizer = DenseAdam(
        [
            {"params": [p for p in dense.values() if p is not decayed]},
            {"params": [decayed], "l2": golden.meta["l2"]},
        ]
    )
    trajectory = Trajectory()
    for step in range(1, golden.meta["steps"] + 1):
        ids, numbers, label = golden.batch(step)
        for group in dense_optimizer.param_groups:
            group["lr"] = golden.dense_lr(step)
        embedding_optimizer.zero_grad()
        dense_optimizer.zero_grad()
        embeddings, first_order = (
            torch.stack([tables[kind, n](ids[:, i]) for i, n in enumerate(names)], 1)
            for kind in ("embedding", "first_order")
        )
        logits = (
            network(embeddings, numbers)
            + first_order.sum((1, 2))
            + functional.linear(numbers, decayed).squeeze(1)
            + dense["bias"]
        )
        functional.binary_cross_entropy_with_logits(logits, label).backward()
        embedding_optimizer.step()
        dense_optimizer.step()
        if step in CHECKED_STEPS:
            trajectory.weights[step] = {
                **{key: table.weight.detach().clone() for key, table in tables.items()},
                **{("dense", n): p.detach().clone() for n, p in dense.items()},
            }
    return trajectory
