"""fp16 and bf16 tables: the same random bits on any plan, and no drift from the fp32 result."""

from dataclasses import replace

import pytest
import torch

from support.parity import Case, results_of, train_reference
from support.parity_cases import SUMS

STEPS = 4
DTYPES = {"FP16": torch.float16, "BF16": torch.bfloat16}
# Of each table, so that a few runs have every plan.
ON_ONE_NODE = ("data_parallel", "row_wise", "table_wise", "column_wise", "row_wise")
ON_TWO_NODES = ("table_row_wise", "table_column_wise", "table_wise", "table_row_wise", "grid_shard")
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
    for plan in ("table_wise", ON_ONE_NODE, ON_TWO_NODES)
]
# On one process, what the others are compared with.
ALONE = tuple(case for case in CASES if case.plan == "table_wise")
TOGETHER = {2: tuple(case for case in CASES[:6] if case not in ALONE)}
# Where two nodes differ from one.
TOGETHER[4] = tuple(case for case in TOGETHER[2] if case.plan == ON_TWO_NODES)


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "case, count",
    [
        pytest.param(case, count, id=f"{case.data_type} {case.plan} {count} processes")
        for count in TOGETHER
        for case in TOGETHER[count]
    ],
)
def test_plans_agree_to_a_unit_in_the_last_place(case, count):
    dtype = DTYPES[case.data_type]
    same = replace(case, plan="table_wise")
    whole = results_of(1, ALONE)[same]["weights"]
    found = results_of(count, TOGETHER[count])[case]["weights"]
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
