"""Programs that might falsify counts or thresholds in TorchRec; see also `test_refused.py`."""

import gc

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchrec import KeyedJaggedTensor, PoolingType
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import row_wise, table_row_wise
from torchrec.distributed.train_pipeline import TrainPipelineBase
from torchrec.distributed.train_pipeline.gradient_accumulation import (
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from stampede.optim import (
    FrozenTables,
    NonFiniteGradientError,
    TableInit,
    cowclip_sharders,
    local_cowclip_tables,
)
from support import bags
from support.gathering import tables_of, whole_tables
from support.parity import (
    Case,
    Holder,
    Table,
    build_collection,
    global_batch,
    local_batch,
    sharded_loss,
    train,
)
from support.parity import shard as shard_case
from support.ranks import process_group, run_ranks
from support.two_tables import (
    CLIP,
    CPU,
    SETTINGS,
    Model,
    assert_trains,
    dense_optimizer,
    embeddings_of,
    features,
    shard,
    steps_of,
    weights_of,
)
from support.unsharded import Unsharded, relative_deviation


def shard_two_alike():
    one, other = shard(Model()), shard(Model())
    other.load_state_dict(one.state_dict())
    return one, other


def test_tables_step_with_the_last_pass_that_was_announced():
    model = shard(Model(), cowclip_sharders(backwards_per_step=3))
    optimizer = dense_optimizer(model)
    for _ in range(2):
        before = weights_of(model)
        for _ in range(2):
            model(features()).sum().backward()
            assert torch.equal(weights_of(model), before)
        assert_trains(model)
        optimizer.step()
    assert steps_of(model) == [2]
    for _ in range(3):
        model(features()).sum().backward()
    with pytest.raises(ValueError, match="second update"):
        model(features()).sum().backward()


@pytest.mark.parametrize("passes", [1, 2])
def test_a_step_that_failed_is_over_with_all_its_passes(passes):
    model = shard(Model(), cowclip_sharders(backwards_per_step=passes))
    optimizer = dense_optimizer(model)
    for fails in (False, True, True, False):
        before = weights_of(model)
        for _ in range(passes - 1):
            model(features()).sum().backward()
        if fails:
            with pytest.raises(NonFiniteGradientError):
                (model(features()).sum() * float("nan")).backward()
        assert torch.equal(weights_of(model), before)
        if not fails:
            assert_trains(model)
            optimizer.step()


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def forward(self, batch):
        loss = self.model(batch).square().sum()
        return loss, loss


def test_torchrecs_wrapper_accumulates_also_where_an_epoch_ends_within_a_step():
    def sharded(passes):
        torch.manual_seed(0)
        model = shard(WithLoss(), cowclip_sharders(TableInit(std=0.1), backwards_per_step=passes))
        return model, torch.optim.SGD(model.module.model.dense.parameters(), lr=0.1)

    model, optimizer = sharded(passes=2)
    pipeline = TrainPipelineBase(model, optimizer, torch.device("cpu"))
    config = GradientAccumulationConfig(num_steps=2)
    wrapped = GradientAccumulationWrapper(pipeline, optimizer, model, config)
    batches = iter([features(number) for number in range(5)])
    with pytest.raises(StopIteration):
        while True:
            wrapped.progress(batches)
    found, steps = (weights_of(model), model.module.model.dense.weight), steps_of(model)
    model, optimizer = sharded(passes=1)
    for numbers in ((0, 1), (2, 3), (4,)):
        optimizer.zero_grad()
        sum(model(features(number))[0] for number in numbers).backward()
        optimizer.step()
    assert steps == steps_of(model) == [3]
    expected = weights_of(model), model.module.model.dense.weight
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_several_backwards_can_be_allowed():
    model = shard(Model(), cowclip_sharders(backwards_per_step=None))
    optimizer = dense_optimizer(model)
    for _ in range(3):
        assert_trains(model)
        assert_trains(model)
        optimizer.step()
    # They are, where no dense optimizer says when a step is over.
    model = shard(Model())
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()
    for _ in range(3):
        assert_trains(model)


def stepper(module, loss_of):
    """What takes a step of an optimizer of its own when called."""
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        loss_of(module).backward()
        optimizer.step()

    return step


def unrelated():
    return stepper(nn.Linear(4, 1), lambda critic: critic(torch.ones(1, 4)).sum())


def test_optimizers_of_other_networks_do_not_excuse_accumulation():
    model = shard(Model())
    dense, other = dense_optimizer(model), unrelated()
    for _ in range(10):
        assert_trains(model)
        dense.step()
        other()
    assert_trains(model)
    other()
    with pytest.raises(ValueError, match="second update"):
        model(features()).sum().backward()


def test_tables_step_early_with_their_own_optimizer():
    model = shard(Model(), cowclip_sharders(backwards_per_step=3))
    for passes in (2, 3, 1):
        for _ in range(passes):
            model(features()).sum().backward()
        model.fused_optimizer.step()
    assert steps_of(model) == [3]
    for _ in range(3):
        model(features()).sum().backward()
    with pytest.raises(ValueError, match="second update"):
        model(features()).sum().backward()


def test_heads_may_train_in_turn_each_with_an_optimizer():
    model = shard(Model())
    heads = [nn.Linear(16, 1) for _ in range(3)]
    optimizers = [torch.optim.SGD(head.parameters(), lr=0.1) for head in heads]
    for number in range(12):
        head, optimizer = heads[number % 3], optimizers[number % 3]
        head(model.module.tables(features()).values()).sum().backward()
        optimizer.step()
    assert steps_of(model) == [12]


def test_a_first_step_before_all_announced_passes_is_told(caplog):
    model = shard(Model(), cowclip_sharders(backwards_per_step=3))
    dense = dense_optimizer(model)
    for _ in range(2):
        model(features()).sum().backward()
    dense.step()
    model(features()).sum().backward()
    assert steps_of(model) == [1]
    (told,) = [r.getMessage() for r in caplog.records if r.name == "stampede.optim"]
    assert "before all 3 announced" in told and "model.fused_optimizer" in told


@pytest.mark.slow
def test_a_model_that_is_gone_leaves_no_hook_behind():
    from torch.optim.optimizer import _global_optimizer_post_hooks as hooks

    # Models of other tests may be there still.
    before = set(hooks)
    model = shard(Model())
    (added,) = set(hooks) - before
    del model
    gc.collect()
    assert added not in hooks


def test_two_lookups_of_one_forward_add_their_counts():
    torch.manual_seed(0)
    model = Model()
    reference, once = (
        Unsharded(model, 0.1, granularity="cowclip", **options, **CLIP, **SETTINGS)
        for options in ({}, {"force_counts": 1})
    )
    model = shard(model)
    start, dense = whole_tables(model), dense_optimizer(model)
    for unsharded in (reference, once):
        unsharded.copy_tables(start)
    for step in range(5):

        def loss_of(model, step=step):
            first, second = (model(features(seed)) for seed in (2 * step, 2 * step + 1))
            return (first.sigmoid() * second).sum() * 10

        dense.zero_grad()
        loss_of(model).backward()
        dense.step()
        for unsharded in (reference, once):
            unsharded.step(loss_of)
    found = whole_tables(model)
    assert relative_deviation(found, reference.weights, start) < 1e-4
    assert relative_deviation(found, once.weights, start) > 1e-2
    assert steps_of(model) == [5]


@pytest.mark.slow
def test_ids_of_every_kind_are_accepted():
    model, wanted = shard_two_alike()
    ids, lengths = torch.tensor([1, 2, 2, 3, 4, 4]), torch.tensor([2, 1, 1, 2])
    wanted(KeyedJaggedTensor(["fa", "fb"], ids, lengths=lengths)).sum().backward()
    jagged = torch.nested.nested_tensor_from_jagged
    for accepted in (
        KeyedJaggedTensor(["fa", "fb"], ids.int(), lengths=lengths.int()),
        KeyedJaggedTensor(["fx", "fb", "fa"], ids.repeat(2)[[0, *range(3, 9)]],
                          lengths=torch.tensor([0, 1, 1, 2, 2, 1])),
        TensorDict({"fa": jagged(ids[:3], lengths=lengths[:2]),
                    "fb": jagged(ids[3:], lengths=lengths[2:])}),
    ):  # fmt: skip
        fresh = shard(Model())
        fresh.load_state_dict(model.state_dict())
        fresh(accepted).sum().backward()
        assert torch.equal(weights_of(fresh), weights_of(wanted))


@pytest.mark.parametrize("samples", [0, 2])
def test_a_batch_without_ids_is_a_step(samples):
    model = shard(Model(), l2=0.0)
    before = weights_of(model)
    none = torch.zeros(0, dtype=torch.int64)
    empty = KeyedJaggedTensor(["fa", "fb"], none, lengths=none.new_zeros(2 * samples))
    model(empty).sum().backward()
    assert torch.equal(weights_of(model), before)
    assert steps_of(model) == [1]


def test_bags_that_no_sample_is_told_of_are_refused():
    ids, lengths = torch.tensor([1, 2, 3]), torch.ones(3, dtype=torch.int64)
    sizes = {"stride_per_key_per_rank": [[1], [2]]}
    with pytest.raises(ValueError, match="feature 'fa' has a batch size of its own"):
        shard(Model())(KeyedJaggedTensor(["fa", "fb"], ids, lengths=lengths, **sizes))


def test_an_error_inside_backward_does_not_spoil_the_next():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("on purpose")

    clean, spoilt = shard_two_alike()
    fails = Fails.apply(spoilt.module.tables(features(1)).values())
    (tables,) = local_cowclip_tables(spoilt)
    with pytest.raises(RuntimeError, match="on purpose"):
        # What was looked up last goes backward first: its rows are handed in before the error.
        (fails.sum() + spoilt.module.tables(features(2)).values().sum()).backward()
    assert len(tables.gradients) == 1
    for model in (spoilt, clean):
        model(features(3)).sum().backward()
    assert torch.equal(weights_of(spoilt), weights_of(clean))


def nan_case(choice):
    return Case(
        ("table_wise", "column_wise", "row_wise", "data_parallel"),
        tables=(Table(40), Table(23, features=2), Table(30), Table(60)),
        arguments={"on_nonfinite": choice},
        empty_rank=False,
    )


@process_group()
def update_with_nans(choice):
    """A backward whose gradients are NaN in the last sample of the last rank, then a good one.

    Returns:
        The error, the rows skipped on this rank, and the tables at the start and after each
        backward.
    """
    case = nan_case(choice)
    model = shard_case(Holder(build_collection(case)), case)
    tables = [tables_of(model)]
    batch = local_batch(case, 1)
    if dist.get_rank() == dist.get_world_size() - 1:
        for _, _, _, targets in batch.values():
            targets[-1] = float("nan")
    error = None
    try:
        sharded_loss(case, model, batch).backward()
    except ValueError as raised:
        error = type(raised).__name__
    tables.append(tables_of(model))
    train(case, model, [2])
    tables.append(tables_of(model))
    skipped = sum(int(t.row_counts[2]) for t in local_cowclip_tables(model))
    return error, skipped, tables


@pytest.mark.parametrize("choice, error", [("error", "NonFiniteGradientError"), ("skip_row", None)])
def test_nans_of_one_rank_are_seen_by_all(choice, error):
    ranks = run_ranks(2, update_with_nans, choice)
    assert [found for found, _, _ in ranks] == [error] * 2
    start, after_nans, last = ranks[0][2]
    for name, table in start.items():
        assert torch.equal(after_nans[name], table) == (choice == "error")
        assert torch.isfinite(last[name]).all()
        assert not torch.equal(last[name], after_nans[name])
    # Rows of all tables that the last sample looks up.
    case, rows = nan_case(choice), set()
    batch = global_batch(case, 1)
    for table, names in case.features.items():
        for name in names:
            ids, lengths, *_ = batch[name]
            rows |= {(table, row) for row in ids[len(ids) - int(lengths[-1]) :].tolist()}
    assert sum(skipped for _, skipped, _ in ranks) == (0 if choice == "error" else len(rows))


def test_a_scaler_that_does_not_scale_or_scales_something_else_is_fine():
    model, other = shard(Model()), nn.Linear(4, 1)
    scaler, dense = torch.amp.GradScaler("cpu"), dense_optimizer(model)
    for _ in range(2):
        assert_trains(model)
        dense.step()
        scaler.scale(other(torch.ones(2, 4)).sum()).backward()
        scaler.step(torch.optim.SGD(other.parameters(), lr=0.1))
        scaler.update()
    for options in ({"enabled": False}, {"init_scale": 1.0}):
        harmless = torch.amp.GradScaler("cpu", **options)
        harmless.scale(model(features()).sum()).backward()
        harmless.step(dense)


@pytest.mark.parametrize("passes", [1, None])
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_scaler_is_refused_whatever_the_optimizer(passes, is_fused):
    model = shard(Model(), cowclip_sharders(backwards_per_step=passes))
    dense = torch.optim.Adam(model.module.dense.parameters(), fused=is_fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with pytest.raises(ValueError, match="a GradScaler scales the loss by 1024"):
        for _ in range(2):
            scaler.scale(model(features()).sum()).backward()
            scaler.step(dense)


def test_frozen_tables_do_not_count_passes():
    model = Model()
    apply_optimizer_in_backward(FrozenTables, embeddings_of(model), {})
    model = DistributedModelParallel(model, device=CPU, sharders=cowclip_sharders())
    before, dense = weights_of(model), dense_optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        found = model(features())
        scaler.scale(found.sum()).backward(retain_graph=True)
        scaler.scale(found.square().sum()).backward()
        scaler.step(dense)
        scaler.update()
    assert torch.equal(weights_of(model), before)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_second_backward_of_one_forward_is_refused(passes):
    model = shard(Model(), cowclip_sharders(backwards_per_step=passes))
    found = model(features())
    found.sum().backward(retain_graph=True)
    with pytest.raises(ValueError, match="a second backward of one forward"):
        found.square().sum().backward()


@pytest.mark.parametrize("passes", [1, 2])
def test_a_step_that_is_left_out_is_told_by_the_tables_own_optimizer(passes):
    model, other = shard_two_alike()
    model = shard(Model(), cowclip_sharders(backwards_per_step=passes))
    model.load_state_dict(other.state_dict())
    dense = dense_optimizer(other), dense_optimizer(model)
    for step in range(4):
        other(features(step)).sum().backward()
        model(features(step)).sum().backward()
        if step != 1:
            dense[0].step()
            dense[1].step()
        else:
            other.fused_optimizer.step()
        # With two announced, a pass alone is the step.
        if passes == 2 or step == 1:
            model.fused_optimizer.step()
        for each in dense:
            each.zero_grad()
    assert steps_of(model) == steps_of(other) == [4]
    torch.testing.assert_close(weights_of(model), weights_of(other))


def test_gradients_of_other_inputs_may_be_asked_for_any_time():
    model = shard(Model())
    dense = list(model.module.dense.parameters())
    before = weights_of(model)
    loss = model(features()).square().sum()
    gradients = torch.autograd.grad(loss, dense, create_graph=True)
    assert torch.equal(weights_of(model), before)
    (loss + sum(gradient.square().sum() for gradient in gradients).detach()).backward()
    assert not torch.equal(weights_of(model), before)


def test_a_lookup_may_be_recomputed():
    model, other = shard_two_alike()
    start = torch.ones(1, requires_grad=True)
    recomputed = checkpoint(
        lambda factor: (model(features(1)) * factor).sum(), start, use_reentrant=False
    )
    (recomputed + model(features(2)).sum()).backward()
    (other(features(1)).sum() + other(features(2)).sum()).backward()
    assert torch.equal(weights_of(model), weights_of(other))


def weights_for_the_mean(plan):
    """Mean pooling, `is_weighted=False`, and a batch that brings weights; three steps.

    Returns:
        The first output in float64, as it should be, and as it is; the trained table.
    """
    model = bags.with_cowclip(bags.Bags(pooling=PoolingType.MEAN, a=8))
    model = bags.shard(model, plan, cowclip_sharders(TableInit(std=0.1, seed=1)))
    table = bags.weights_of(model)["a"].double()
    ids, weights = torch.tensor([1, 6, 1, 3, 6]), torch.tensor([0.5, 2.0, 1.0, 1.0, 3.0])
    batch = KeyedJaggedTensor(["f_a"], ids, weights, lengths=torch.tensor([2, 3]))
    bag = (table[ids] * weights[:, None]).split([2, 3])
    expected = torch.stack([rows.mean(0) for rows in bag])
    found = model(batch)["f_a"].detach().double()
    for _ in range(3):
        model(batch)["f_a"].square().sum().backward()
    return expected, found, bags.weights_of(model)["a"]


def test_weights_that_a_collection_does_not_announce_have_one_meaning_or_are_refused():
    results = [weights_for_the_mean(plan) for plan in bags.PLANS.values()]
    for expected, found, table in results:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(table, results[0][2], rtol=1e-6, atol=1e-8)
    for plan in (row_wise(), table_row_wise(host_index=0)):
        with pytest.raises(ValueError, match=r"'a'.*mean pooling with per-sample weights.*leave"):
            weights_for_the_mean(plan)


@pytest.mark.parametrize("plan", [*bags.PLANS.values(), row_wise()], ids=[*bags.PLANS, "by rows"])
@pytest.mark.parametrize("use", ["tied softmax", "penalty", "nothing", "reading"])
def test_a_gradient_that_reaches_a_table_outside_of_its_lookup_is_refused(plan, use):
    model = bags.shard(bags.with_cowclip(bags.Bags(a=8, b=8), l2=0.0, rows="touched"), plan)
    before = bags.weights_of(model)
    # A table split into two parts is one parameter of half the width.
    table = dict(model.named_parameters())["ebc.embedding_bags.b.weight"]
    found = model(bags.jagged(["f_a", "f_b"], torch.tensor([[1, 2]])))
    loss = sum(values.square().sum() for values in found.values())
    if use == "reading":
        loss = loss + (loss.detach() * table.detach()).sum()
    elif use == "tied softmax":
        loss = loss + (found["f_b"][:, : table.shape[1]] @ table.T).logsumexp(1).sum()
    else:
        loss = loss + (0.1 if use == "penalty" else 0.0) * table.square().sum()
    if use in ("nothing", "reading"):
        loss.backward()
        for name, after in bags.weights_of(model).items():
            assert (after != before[name]).any(1).nonzero().flatten().tolist() == [1, 2]
    else:
        with pytest.raises(ValueError, match="'b' with CowClip: a gradient reached its weights"):
            loss.backward()
        after = bags.weights_of(model)
        assert all(torch.equal(before[name], after[name]) for name in before)
        # The next batch trains as ever.
        bags.step(model, (1, 2))
        for name, after in bags.weights_of(model).items():
            assert (after != before[name]).any(1).nonzero().flatten().tolist() == [1, 2]
