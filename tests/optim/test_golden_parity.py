"""The authors' TensorFlow code is followed step by step."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from stampede.optim import CowClipAdam, CowClipTables, DenseAdam, native
from stampede.optim.backends.torch import TorchBackend
from stampede.optim.rules import Adam
from stampede.optim.table_array import TableArray
from support.golden import (
    CHECKED_STEPS,
    TOLERANCE,
    Golden,
    largest_count,
    train_with_the_engine,
    worst,
)
from support.paths import shared

FILES = ("deepfm", "deepfm_bound")
# As in support.golden: before, the movement of the dense layers is below float32 rounding.
FIRST_DENSE_STEP = 5
# Dense weights with an L2 term: the numbers' first-order ones, and the cross layers' without bias
# and gates, which deepctr gives 1e-5 of their own (here equal to the tables' l2).
DECAYED = re.compile(r"linear_kernel|cross_net/kernel|cross_net_mix/[UVC]_list")
PLANS = (
    "data_parallel",
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
)


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
    [*(("deepfm", plan) for plan in PLANS), ("deepfm_bound", "row_wise"),
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


@pytest.mark.parametrize("name", [*FILES, "wd", "dcn", "dcnv2"])
def test_as_a_plain_torch_optimizer(name):
    golden = Golden(golden_file(name))
    assert train_plain(golden) < TOLERANCE


@pytest.mark.parametrize("changes", [{"clip": None}, {"eps_placement": "torch"}])
def test_a_plain_torch_optimizer_with_other_settings_fails(changes):
    assert train_plain(Golden(golden_file("wd")), **changes) > TOLERANCE


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


def train_plain(golden, **changes):
    """The same training in plain PyTorch, with sparse `nn.Embedding` tables.

    Args:
        changes: of the embeddings' optimizer, for negative tests.

    Returns:
        The largest deviation, as `support.golden.worst`.
    """
    fields, meta = list(golden.vocabulary), golden.meta
    start = {name: stored(golden, 0, name) for name in golden.index}
    tables = {
        name: nn.Embedding.from_pretrained(weight, freeze=False, sparse=True)
        for name, weight in start.items()
        if name.endswith("/embeddings")
    }
    dense = {name: nn.Parameter(w) for name, w in start.items() if name not in tables}
    embeddings, first_order = (
        [tables[f"{kind}_{field}/embeddings"] for field in fields]
        for kind in ("sparse_emb", "linear0sparse_emb")
    )
    embedding_optimizer = CowClipAdam(
        [
            {"params": [table.weight for table in embeddings]},
            {"params": [table.weight for table in first_order], "clip": None},
        ],
        **{"lr": meta["lr_embed"], "l2": meta["l2"], "clip": golden.clip(), **changes},
    )
    dense_optimizer = DenseAdam(
        [
            {"params": [p for name, p in dense.items() if not DECAYED.search(name)]},
            {"params": [p for name, p in dense.items() if DECAYED.search(name)], "l2": meta["l2"]},
        ]
    )
    kernel, worst_of_all = dense["linear/linear_kernel"], 0.0
    for step in range(1, meta["steps"] + 1):
        ids, numbers, label = golden.batch(step)
        for group in dense_optimizer.param_groups:
            group["lr"] = golden.dense_lr(step)
        embedding_optimizer.zero_grad()
        dense_optimizer.zero_grad()
        looked_up = [table(ids[:, i]) for i, table in enumerate(embeddings)]
        linear = sum(table(ids[:, i]) for i, table in enumerate(first_order))
        logits = network(meta["model"], dense, looked_up, numbers) + linear + numbers @ kernel
        logits = (logits + dense["prediction_layer/global_bias"]).squeeze(1)
        functional.binary_cross_entropy_with_logits(logits, label).backward()
        embedding_optimizer.step()
        dense_optimizer.step()
        if step in CHECKED_STEPS:
            ours = {name: table.weight.detach() for name, table in tables.items()} | dense
            for kind in ("sparse_emb", "linear0sparse_emb", ""):
                names = [n for n in start if n.startswith(kind) and (kind or n in dense)]
                if kind or step >= FIRST_DENSE_STEP:
                    worst_of_all = max(worst_of_all, deviation(golden, step, names, ours))
    return worst_of_all


def stored(golden, step, name):
    return torch.from_numpy(golden.arrays[f"w{step}/{golden.index[name]}"]).clone()


def deviation(golden, step, names, ours):
    """Largest difference of the named weights, relative to their largest movement."""
    theirs = {name: stored(golden, step, name) for name in names}
    movement = max((theirs[n] - stored(golden, 0, n)).abs().max() for n in names)
    return float(max((ours[n].detach() - theirs[n]).abs().max() for n in names) / movement)


def network(model, dense, embeddings, numbers):
    """Logits `[batch, 1]` of the authors' networks without first-order terms, as deepctr's."""
    inputs = torch.cat([*embeddings, numbers], 1)
    deep = inputs
    for layer in range(2):
        deep = functional.relu(deep @ dense[f"dnn/kernel{layer}"] + dense[f"dnn/bias{layer}"])
    crossed = inputs
    for layer in range(3):
        if model == "DCN":
            kernel, bias = (dense[f"cross_net/{part}{layer}"] for part in ("kernel", "bias"))
            crossed = inputs * (crossed @ kernel) + bias.T + crossed
        elif model == "DCNv2":
            crossed = mixed_cross(dense, layer, inputs, crossed)
    if model.startswith("DCN"):
        return torch.cat([crossed, deep], 1) @ dense["dense/kernel"]
    logits = deep @ dense["dense/kernel"]
    if model == "DeepFM":
        stacked = torch.stack(embeddings, 1)
        squares = stacked.sum(1).square() - stacked.square().sum(1)
        logits = logits + 0.5 * squares.sum(1, keepdim=True)
    return logits


def mixed_cross(dense, layer, inputs, crossed):
    """A cross layer of DCNv2: a mixture of four low-rank experts."""
    u, v, c = (dense[f"cross_net_mix/{part}_list{layer}"] for part in "UVC")
    bias = dense[f"cross_net_mix/bias{layer}"].T
    gates, experts = [], []
    for expert in range(4):
        gate = "dense" if expert == 0 else f"dense_{expert}"
        gates.append(crossed @ dense[f"cross_net_mix/{gate}/kernel"])
        low_rank = torch.tanh(torch.tanh(crossed @ v[expert]) @ c[expert].T)
        experts.append(inputs * (low_rank @ u[expert].T + bias))
    share = torch.softmax(torch.cat(gates, 1), 1)
    return (torch.stack(experts, 2) * share[:, None]).sum(2) + crossed
