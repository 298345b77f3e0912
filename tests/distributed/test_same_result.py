"""Any number of ranks and any plan give the losses and weights of one process."""

import json

import pytest
import torch

from support.jobs import losses_and_weights, run_small
from support.ranks import run_ranks

pytestmark = pytest.mark.slow


def assert_same(one, other):
    assert other[0] == pytest.approx(one[0], rel=1e-5)
    assert other[1].samples == one[1].samples
    assert other[1].auc == pytest.approx(one[1].auc, abs=1e-4)
    assert other[1].logloss == pytest.approx(one[1].logloss, rel=1e-5)
    for field, weights in one[2].items():
        for mine, theirs in zip(weights, other[2][field], strict=True):
            torch.testing.assert_close(theirs, mine, rtol=1e-3, atol=1e-5)


# Last training batches of 256 (full), 1 = ranks - 1 and 3 = ranks + 1 samples.
@pytest.mark.parametrize(
    "plan, rows", [("table_wise", 1793), ("row_wise", 1795), ("table_row_wise", 1793),
                   ("auto", 1792)],
)  # fmt: skip
def test_two_ranks(tmp_path, plan, rows):
    overrides = [f"data.rows={rows}", "evaluate.select_on=test", "data.test_rows=259"]
    alone = losses_and_weights(tmp_path, overrides)
    assert alone[1].samples == 259
    together = run_ranks(2, losses_and_weights, tmp_path, [*overrides, f"sharding.plan={plan}"], 2)
    assert_same(alone, together[0])
    assert together[0][0] == together[1][0]
    if plan != "auto":
        assert together[0][3] == {plan}


def test_lower_precision_between_ranks(tmp_path):
    at = "sharding.communication"
    overrides = ["data.rows=1024", "model.dim=10", "sharding.plan=row_wise"]
    exact, rounded = (
        run_ranks(2, losses_and_weights, tmp_path, [*overrides, *more], 2)[0]
        for more in ([], [f"{at}.forward=fp16", f"{at}.backward=bf16"])
    )
    assert rounded[0] != exact[0]
    assert rounded[0] == pytest.approx(exact[0], rel=1e-3)


# Last batches of 1, ranks - 1 and ranks + 1 samples, in training and evaluation.
@pytest.mark.parametrize("last", [1, 3, 5])
def test_four_ranks(tmp_path, last):
    overrides = [f"data.rows={512 + last}", "evaluate.select_on=test",
                 f"data.test_rows={128 + last}"]  # fmt: skip
    alone = losses_and_weights(tmp_path, overrides)
    together = run_ranks(4, losses_and_weights, tmp_path, [*overrides, "sharding.plan=row_wise"], 4)
    assert_same(alone, together[0])


def test_resume_on_another_number_of_ranks_and_plan(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    run_small(whole, ["train.epochs=2"])
    run_ranks(2, run_small, parts, ["train.epochs=1", "sharding.plan=row_wise"], 2)
    run_small(parts, ["train.epochs=2", "checkpoint.resume=auto"])
    one, other = (json.loads((f / "small/summary.json").read_text()) for f in (whole, parts))
    assert one["steps"] == other["steps"]
    assert other["auc"] == pytest.approx(one["auc"], abs=1e-3)
    assert other["logloss"] == pytest.approx(one["logloss"], rel=1e-4)
