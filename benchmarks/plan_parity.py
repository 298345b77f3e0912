"""Largest deviation from float64 plain PyTorch, by sharding plan and number of processes.

The runs are from tests/distributed/test_every_plan.py: 20 steps of CowClip with Adam. Deviations
are relative to the largest movement of any weight. Also reports each optimizer's state.

    python benchmarks/plan_parity.py
"""

from __future__ import annotations

import torch
from report import begin

from stampede.optim import CowClip
from stampede.optim.rules import SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam
from stampede.optim.settings import UpdateSettings
from stampede.optim.table_array import TableArray, TableShard
from support.parity import run_cases
from support.parity_cases import PLANS, every_plan
from support.parity_reference import deviation, state_deviation, train_reference
from support.ranks import run_ranks

# Number of processes: processes of a simulated node.
PROCESSES = {1: 1, 2: 2, 4: 2}
RULES = {
    "adam": Adam(),
    "rowwise_adam": RowWiseAdam(),
    "adagrad": Adagrad(),
    "rowwise_adagrad": RowWiseAdagrad(),
    "sgd": SGD(),
    "sgd, momentum": SGD(momentum=0.9),
}


def main() -> None:
    _, report = begin("plan_parity", __doc__)
    cases = every_plan()
    found = {}
    for count, per_node in PROCESSES.items():
        results = run_ranks(count, run_cases, cases, per_node, ranks_per_node=per_node)[0]
        for case, result in zip(cases, results, strict=True):
            reference = train_reference(case, result["start"])
            found[f"{case.plan} {case.arguments['rows']} {count}"] = {
                "weights": deviation(case, result["start"], result["weights"], reference),
                "moments": state_deviation(case, result["states"], reference),
                "clipped_share": reference.clipped / reference.touched,
                "largest_count": reference.largest_count,
            }
    memory = {name: state_bytes(rule) for name, rule in RULES.items()}
    report.add(deviations=found, state_bytes_per_row=memory)
    print_deviations(found)
    print_memory(memory)
    report.close()


def state_bytes(rule: object) -> dict[str, int]:
    """Bytes of state per row: a table of 16 columns, and the engine's stored row of 10 + 1 + 1."""
    sizes = {}
    for name, dim, clip in (("dim 16", 16, CowClip()), ("10 + 1", 12, CowClip(columns=10))):
        rows = 1000
        array = TableArray.create(
            (TableShard("t", rows),), torch.zeros(rows, dim), UpdateSettings(rule, clip), dim
        )
        sizes[name] = sum(state.nbytes for state in array.states.values()) // rows
    return sizes


def print_deviations(found: dict) -> None:
    """One line a plan."""
    heads = [f"{rows} x{count}" for count in PROCESSES for rows in ("all", "touched")]
    print("largest deviation of a weight, relative to the largest movement")
    print(f"{'plan':<18}" + "".join(f"{head:>12}" for head in heads))
    for plan in PLANS:
        cells = [
            found[f"{plan} {rows} {count}"]["weights"]
            for count in PROCESSES
            for rows in ("all", "touched")
        ]
        print(f"{plan:<18}" + "".join(f"{cell:>12.1e}" for cell in cells))


def print_memory(memory: dict) -> None:
    """One line an optimizer."""
    print("\nbytes of state per row")
    for name, sizes in memory.items():
        print(f"{name:<18}" + "".join(f"{kind}: {size:<8}" for kind, size in sizes.items()))


if __name__ == "__main__":
    main()
