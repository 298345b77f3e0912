"""Lower precision: of tables, with the same random bits on any plan, and of what ranks send."""

from dataclasses import replace

import pytest
import torch

from support.parity import Case, Table, results_of, run_cases
from support.parity_cases import PLANS, SUMS
from support.parity_reference import deviation, train_reference
from support.ranks import run_ranks

STEPS = 4
DTYPES = {"FP16": torch.float16, "BF16": torch.bfloat16}
CASES = [
    Case(
        plan=plan,
        tables=(*SUMS, *(type(SUMS[0])(300),)),
        data_type=data_type,
        steps=STEPS,
        batch=64,
        absent=False,
        arguments={"lr": 1e-3, "rows": rows},
    )
    for data_type, rows in (("FP16", "all"), ("BF16", "touched"), ("BF16", "all"))
    for plan in PLANS
]
# On one process, what the others are compared with.
ALONE = tuple(case for case in CASES if case.plan == "table_wise")
TOGETHER = tuple(CASES[: 2 * len(PLANS)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, count",
    [
        pytest.param(case, count, id=f"{case.data_type} {case.plan} {count} processes")
        for count in (2, 4)
        for case in TOGETHER
    ],
)
def test_plans_agree_to_a_unit_in_the_last_place(case, count):
    dtype = DTYPES[case.data_type]
    same = replace(case, plan="table_wise")
    whole = results_of(1, ALONE)[same]["weights"]
    found = results_of(count, TOGETHER)[case]["weights"]
    differing = elements = 0
    for name, weights in whole.items():
        assert weights.dtype == dtype
        unit = torch.finfo(dtype).eps * weights.float().abs().clamp_min(2.0**-14)
        difference = (found[name].float() - weights.float()).abs()
        assert (difference <= STEPS * unit).all()
        differing += int((difference > 0).sum())
        elements += weights.numel()
    assert differing <= 0.01 * STEPS * elements


@pytest.mark.parametrize("data_type", DTYPES)
def test_the_result_does_not_drift_from_that_of_float64(data_type):
    """Rounding is many times larger than the difference of the means."""
    case = next(
        case for case in ALONE if (case.data_type, case.arguments["rows"]) == (data_type, "all")
    )
    found = results_of(1, ALONE)[case]
    reference = train_reference(case, found["start"])
    errors = torch.cat(
        [(found["weights"][n].double() - reference.weights[n]).flatten() for n in case.names]
    )
    assert errors.abs().max() > 1e-5
    assert errors.mean().abs() < 5 * errors.std() / errors.numel() ** 0.5
    # Round to nearest would lose every step smaller than half a unit: nothing would move.
    moved = torch.cat([(reference.weights[n] - found["start"][n].double()).flatten()
                       for n in case.names])  # fmt: skip
    assert torch.corrcoef(torch.stack([moved + errors, moved]))[0, 1] > 0.8


PRECISIONS = {("fp16", "fp32"): 2e-3, ("bf16", "bf16"): 3e-2}
SENT = [
    Case(plan, (Table(40), Table(60)), sequence=sequence, steps=6, communication=precisions)
    for precisions in PRECISIONS
    for sequence, plans in (
        (False, ("row_wise", "grid_shard", ("column_wise", "data_parallel"))),
        (True, ("row_wise",)),
    )
    for plan in plans
]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def sent(request):
    """Of every case, on so many ranks."""
    return run_ranks(request.param, run_cases, SENT, 2, ranks_per_node=2)[0]


@pytest.mark.parametrize(
    "index", range(len(SENT)), ids=lambda i: f"{SENT[i].plan}-{SENT[i].communication}-{i}"
)
def test_lower_precision_stays_near_the_equations(sent, index):
    case, result = SENT[index], sent[index]
    reference = train_reference(case, result["start"])
    found = deviation(case, result["start"], result["weights"], reference)
    # It is used, and no more than rounding.
    assert 1e-5 < found < PRECISIONS[case.communication]
    assert result["counts"][0] == reference.touched
    assert abs(result["counts"][1] - reference.clipped) <= 0.01 * reference.touched
    # The counts matter, and the test sees it.
    wrong = train_reference(case, result["start"], force_counts=1)
    assert deviation(case, result["start"], result["weights"], wrong) > 5 * found
