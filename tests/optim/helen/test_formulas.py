"""Helen against the float64 re-derivation."""

import pytest
import torch

from stampede.optim.helen import Helen
from support.helen_model import ROWS, SETTINGS, Net, largest_difference, reference_after, train


@pytest.mark.parametrize("net_pert", [False, True])
@pytest.mark.parametrize("dense_norm", ["all", "last_table"])
def test_twenty_steps_are_those_of_the_formulas(net_pert, dense_norm):
    settings = SETTINGS | dict(net_pert=net_pert, dense_norm=dense_norm)
    model = Net()
    expected = reference_after(model, 20, **settings)
    train(model, Helen(model.by_kind(), **settings), 20)
    assert largest_difference(model, expected) < 1e-12


@pytest.mark.parametrize("net_pert", [False, True])
def test_l2_in_the_loss_reaches_norm_perturbation_and_absent_rows(net_pert):
    settings = SETTINGS | dict(net_pert=net_pert)
    model = Net()
    everywhere = {name: 0.05 for name, _ in model.named_parameters()}
    expected = reference_after(model, 20, l2=everywhere, **settings)
    train(model, Helen(model.by_kind(), l2=0.05, **settings), 20)
    assert largest_difference(model, expected) < 1e-12


def test_touched_is_the_formula_restricted_to_the_rows_of_the_batch():
    model = Net()
    tables = {f"{name}.weight": 0.05 for name in ROWS}
    settings = SETTINGS | dict(net_pert=True)
    expected = reference_after(model, 20, touched_only=tuple(tables), l2=tables, **settings)
    groups = [group | {"rows": "touched"} for group in model.by_kind()]
    wide = {"params": [model.wide.weight], "kind": "dense", "rows": "touched", "l2": 0.05}
    groups[0]["l2"] = 0.05
    groups[1]["params"] = [p for p in groups[1]["params"] if p is not model.wide.weight]
    train(model, Helen([*groups, wide], **settings), 20)
    assert largest_difference(model, expected) < 1e-12


def test_float32_stays_close():
    model = Net(torch.float32)
    expected = reference_after(model, 20, **SETTINGS)
    train(model, Helen(model.by_kind(), **SETTINGS), 20)
    assert largest_difference(model, expected) < 1e-4


@pytest.mark.parametrize(
    "change",
    [
        {"bound": 0.41},
        {"rho": 0.31},
        {"net_pert": True},
        {"weight_decay": 0.0},
        {"eps": 1e-7},
        {"l2": {"item.weight": 1e-3}},
        {"change_counts": lambda counts: counts.clamp(max=1)},
        {"change_counts": lambda counts: counts.clamp(max=2)},
    ],
    ids=" ".join,
)
def test_the_comparison_notices_a_change(change):
    model = Net()
    changed = reference_after(model, 20, **SETTINGS | change)
    train(model, Helen(model.by_kind(), **SETTINGS), 20)
    assert largest_difference(model, changed) > 1e-6


def test_the_two_norms_for_dense_parameters_differ():
    model, last = Net(), {"net_pert": True, "dense_norm": "last_table"}
    changed = reference_after(model, 20, **SETTINGS | last)
    train(model, Helen(model.by_kind(), **SETTINGS, net_pert=True), 20)
    assert largest_difference(model, changed) > 1e-6
