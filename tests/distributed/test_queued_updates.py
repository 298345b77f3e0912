"""Queued updates where a rank has no tables; Triton's interpreter runs the kernels."""

from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from stampede.optim import NonFiniteGradientError, local_cowclip_tables, table_update
from support.parity import Case, Holder, Table, build_collection, shard
from support.ranks import process_group, run_ranks
from support.updated_tables import computed

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

# On two ranks one has no table.
ONE_TABLE = Case("table_wise", (Table(50, 8),))


def train(way, lookups, poisoned=None, untrusted=None):
    """Some steps of several lookups each; sums of the rows on each rank, and who has tables.

    Args:
        lookups: of each step.
        poisoned: number of a step, from 0, whose gradient is not finite.
        untrusted: the rank on which the check finds a wrong kernel.
    """
    with process_group(), computed(way), ExitStack() as stack:
        if dist.get_rank() == untrusted:
            check = import_module("stampede.optim.triton.check")
            wrong = mock.patch.object(check, "why_not_trusted", lambda *_, **__: "it is wrong")
            stack.enter_context(wrong)
        model = shard(Holder(build_collection(ONE_TABLE)), ONE_TABLE, backwards_per_step=None)
        found = None
        for step, count in enumerate(lookups):
            ids = torch.tensor([step, 3, 4, dist.get_rank()])
            lengths = torch.ones(4, dtype=torch.int32)
            batch = KeyedJaggedTensor.from_lengths_sync(keys=["f0_0"], values=ids, lengths=lengths)
            loss = sum(model(batch).values().sum() for _ in range(count))
            (loss * float("nan") if step == poisoned else loss).backward()
        try:
            model.state_dict()
        except NonFiniteGradientError as failure:
            found = failure.ago
        tables = local_cowclip_tables(model)
        weights = [w.double().sum().item() for t in tables for w in t.split_embedding_weights()]
        is_queued = table_update(model).flag is not None
        return {"weights": weights, "found": found, "is_queued": is_queued}


def test_no_rank_queues_if_one_does_not_trust_its_kernels():
    """Queued updates exchange a flag, for which the others would wait."""
    ranks = run_ranks(2, train, "queued", (1, 1), None, 0)
    assert [rank["is_queued"] for rank in ranks] == [False, False]
    for one, other in zip(ranks, run_ranks(2, train, "torch", (1, 1)), strict=True):
        assert one["weights"] == pytest.approx(other["weights"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("lookups", [(1, 1, 1), (1, 2, 2, 1)], ids=["one", "several"])
def test_all_ranks_take_the_same_way_also_one_without_tables(lookups):
    queued = run_ranks(2, train, "queued", lookups)
    swept = run_ranks(2, train, "kernels", lookups)
    assert [rank["is_queued"] for rank in queued] == [True, True]
    assert sorted(len(rank["weights"]) for rank in queued) == [0, 1]
    for one, other in zip(queued, swept, strict=True):
        assert one["weights"] == pytest.approx(other["weights"], rel=1e-6)


def test_all_ranks_learn_of_a_gradient_that_is_not_finite():
    ranks = run_ranks(2, train, "queued", (1, 1, 1), 1)
    assert [rank["found"] for rank in ranks] == [1, 1]
