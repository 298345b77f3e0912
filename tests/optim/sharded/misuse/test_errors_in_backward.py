"""Errors and NaNs inside of a backward."""

import pytest
import torch

from stampede.optim import (
    NonFiniteGradientError,
    local_cowclip_tables,
)
from support.parity import global_batch
from support.programs import nan_case, update_with_nans
from support.ranks import run_ranks
from support.two_tables import Model, features, shard, weights_of


def test_an_error_inside_backward_does_not_spoil_the_next():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("on purpose")

    spoilt, clean = shard(Model()), shard(Model())
    spoilt.load_state_dict(clean.state_dict())
    fails = Fails.apply(spoilt.module.tables(features(1)).values())
    (tables,) = local_cowclip_tables(spoilt)
    with pytest.raises(RuntimeError, match="on purpose"):
        # What was looked up last goes backward first: its rows are handed in before the error.
        (fails.sum() + spoilt.module.tables(features(2)).values().sum()).backward()
    assert len(tables.gradients) == 1
    for model in (spoilt, clean):
        model(features(3)).sum().backward()
    assert torch.equal(weights_of(spoilt), weights_of(clean))


def test_a_row_with_a_nan_is_an_error_or_left_out():
    for choice in ("error", "skip_row"):
        model = shard(Model(), on_nonfinite=choice)
        before = weights_of(model)
        factors = torch.ones(8)
        factors[2] = float("inf")
        loss = (model(features()) * factors).sum()
        if choice == "error":
            with pytest.raises(NonFiniteGradientError, match="skip_row"):
                loss.backward()
            assert torch.equal(weights_of(model), before)
            continue
        loss.backward()
        (rows,) = [t.row_counts for t in local_cowclip_tables(model)]
        entry = features().to_dict()
        spoilt = sum(
            len(set(entry[key].values()[slice(*entry[key].offsets()[2:4])].tolist()))
            for key in ("fa", "fb")
        )
        assert int(rows[2]) == spoilt
        assert torch.isfinite(weights_of(model)).all()


def test_nans_of_one_rank_are_seen_by_all():
    of_ranks = run_ranks(2, update_with_nans)
    for choice, results in zip(("error", "skip_row"), zip(*of_ranks, strict=True), strict=True):
        expected = "NonFiniteGradientError" if choice == "error" else None
        assert [error for error, _, _ in results] == [expected] * 2
        start, after_nans, last = results[0][2]
        for name, table in start.items():
            assert torch.equal(after_nans[name], table) == (choice == "error")
            assert torch.isfinite(last[name]).all()
            assert not torch.equal(last[name], after_nans[name])
        skipped = sum(count for _, count, _ in results)
        assert skipped == (0 if choice == "error" else rows_of_last_sample(nan_case(choice)))


def rows_of_last_sample(case):
    """How many rows of all tables it looks up."""
    batch, rows = global_batch(case, 1), set()
    for table, names in case.features.items():
        for name in names:
            ids, lengths, *_ = batch[name]
            rows |= {(table, row) for row in ids[len(ids) - int(lengths[-1]) :].tolist()}
    return len(rows)
