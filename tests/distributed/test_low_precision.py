"""fp16 and bf16 tables: the same random bits on any plan, and no drift from the fp32 result."""

import pytest
import torch

from support.parity import Case, run_cases
from support.parity_cases import PLANS, SUMS
from support.parity_reference import train_reference
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
        arguments={"lr": 1e-3, **arguments},
    )
    for data_type in DTYPES
    for plan in PLANS
    for arguments in ({"rows": "all"}, {"rows": "touched"})
]
# Four processes are two nodes of two.
PROCESSES = {1: 1, 2: 2, 4: 2}
BY_PLAN = {(case.data_type, case.plan, case.arguments["rows"]): case for case in CASES}


@pytest.fixture(scope="module")
def results():
    """What every case gave, by number of processes."""
    found = {}
    for count, per_node in PROCESSES.items():
        ranks = run_ranks(count, run_cases, CASES, per_node, ranks_per_node=per_node)
        found[count] = dict(zip(CASES, ranks[0], strict=True))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, count",
    [
        pytest.param(
            case,
            count,
            id=f"{case.data_type} {case.plan} {case.arguments['rows']} {count} processes",
        )
        for case in CASES
        for count in PROCESSES
        # What the others are compared with.
        if (case.plan, count) != ("table_wise", 1)
    ],
)
def test_plans_agree_to_a_unit_in_the_last_place(results, case, count):
    dtype = DTYPES[case.data_type]
    same = BY_PLAN[case.data_type, "table_wise", case.arguments["rows"]]
    whole = results[1][same]["weights"]
    found = results[count][case]["weights"]
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
def test_the_result_does_not_drift_from_that_of_float64(results, data_type):
    """Rounding is many times larger than the difference of the means."""
    case = BY_PLAN[data_type, "table_wise", "all"]
    found = results[1][case]
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
