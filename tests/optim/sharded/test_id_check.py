"""Ids outside of their tables mean the same on every plan, or are refused by name."""

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor
from torchrec.distributed.sharding_plan import grid_shard, row_wise, table_row_wise, table_wise
from torchrec.distributed.types import BoundsCheckMode
from torchrec.modules.embedding_configs import DataType

from stampede.optim import cowclip_sharders
from support.bags import PLANS, Bags, shard, step, weights_of, with_cowclip
from support.ranks import process_group, run_ranks
from support.updated_tables import WAYS, computed

NO_ID = (
    "id -1 of feature 'f_b' is no row of table 'b', whose ids are 0 to 19; leave the bag of a "
    "sample without an id empty (length 0), or give such samples a row of their own"
)
# Of two processes.
BY_ROWS = {
    "row_wise": row_wise(),
    "table_row_wise": table_row_wise(host_index=0),
    "grid_shard": grid_shard(host_indexes=[0]),
}


def batch(*ids):
    """Two samples; of feature `f_b` the second has some ids."""
    lengths = torch.tensor([1, 1, 1, len(ids)])
    return KeyedJaggedTensor(["f_a", "f_b"], torch.tensor([1, 2, 3, *ids]), lengths=lengths)


def sharded(plan, mode=BoundsCheckMode.WARNING, data_type=DataType.FP32):
    sharders = cowclip_sharders(fused_params={"bounds_check_mode": mode})
    model = Bags(a=8, b=8, data_type=data_type)
    return shard(with_cowclip(model, rows="touched"), plan, sharders)


@pytest.mark.parametrize("plan", [*PLANS.values(), row_wise()], ids=[*PLANS, "row_wise"])
@pytest.mark.parametrize("mode", [BoundsCheckMode.WARNING, BoundsCheckMode.FATAL])
@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.BF16])
def test_an_id_of_minus_one_is_named(plan, mode, data_type):
    model = sharded(plan, mode, data_type)
    with pytest.raises(IndexError) as refusal:
        model(batch(4, -1, 5))
    assert str(refusal.value) == NO_ID


@pytest.mark.parametrize("way", WAYS)
def test_every_kernel_names_an_id_of_minus_one_or_takes_the_first_row(way):
    with computed(way):
        model = sharded(table_wise(rank=0))
        if way == "queued":
            # To name it would wait for the GPU.
            before = weights_of(model)["b"]
            model(batch(-1))["f_b"].square().sum().backward()
            changed = (weights_of(model)["b"] != before).any(1)
            assert changed.nonzero().flatten().tolist() == [0, 3]
            return
        with pytest.raises(IndexError, match="id -1 of feature 'f_b' is no row of table 'b'"):
            model(batch(-1))


@process_group()
def outside_of_tables():
    """By plan: the refusal of -1 by the rank that has it, and rows changed by another such id."""
    results = {}
    for name, plan in BY_ROWS.items() if dist.get_world_size() > 1 else PLANS.items():
        model, refusal = sharded(plan), None
        if dist.get_rank() == dist.get_world_size() - 1:
            try:
                model(batch(4, -1, 5))
            except IndexError as refused:
                refusal = str(refused)
        before = weights_of(model)
        step(model, (2, 25, -7))
        after = weights_of(model)
        rows = {}
        if dist.get_rank() == 0:
            changed = {table: (after[table] != before[table]).any(1) for table in after}
            rows = {table: found.nonzero().flatten().tolist() for table, found in changed.items()}
        results[name] = refusal, rows
    return results


@pytest.mark.slow
def test_ids_are_checked_before_they_are_sent_by_rows():
    (alone,), (first, last) = (run_ranks(count, outside_of_tables) for count in (1, 2))
    assert {refusal for refusal, _ in alone.values()} == {NO_ID}
    assert list(first) == list(BY_ROWS)
    for name, (refusal, rows) in first.items():
        assert refusal is None and last[name][0] == NO_ID
        assert rows == {"a": [0, 2], "b": [0, 2]} == alone["whole"][1]


@process_group()
def refused_by(modes):
    for of_sharder, of_plan in modes:
        model = sharded(replace_mode(row_wise(), of_plan), of_sharder)
        if dist.get_rank():
            with pytest.raises(RuntimeError, match="idx < num_rows"):
                model(batch(25))


def replace_mode(plan, mode):
    """A plan whose parameters name a mode."""

    def generate(*arguments):
        sharding = plan(*arguments)
        sharding.bounds_check_mode = mode
        return sharding

    return generate


@pytest.mark.slow
def test_a_fatal_check_refuses_before_ids_are_sent_by_rows():
    fatal, warning = BoundsCheckMode.FATAL, BoundsCheckMode.WARNING
    run_ranks(2, refused_by, [(fatal, None), (warning, fatal)])
