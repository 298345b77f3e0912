"""Tables that begin again between epochs: as freshly made ones, on any plan and after a resume."""

import shutil
from dataclasses import replace

import pytest
import torch

from stampede.engine.checkpoint.retention import newest
from stampede.optim import begin_tables_again
from support import parity
from support.jobs import run_small, tensors_of, without_times
from support.parity import Case, run_cases
from support.parity_cases import ADAPTIVE, SUMS
from support.ranks import run_ranks

pytestmark = pytest.mark.slow

MIXED = ("data_parallel", "row_wise", "column_wise", "table_wise")
CASES = [
    Case(plan=MIXED, tables=SUMS, steps=3),
    Case(plan=MIXED, tables=SUMS, steps=3, rule="rowwise_adam", arguments=ADAPTIVE),
    Case(plan="row_wise", tables=SUMS, steps=3, way="queued"),
]


def train_twice(again):
    """Every case on the same three batches once, or twice with tables that begin again between."""
    # In this process only.
    drawn = parity.global_batch
    parity.global_batch = lambda case, step: drawn(replace(case, steps=3), (step - 1) % 3 + 1)

    def begin(model, step):
        if again and step == 3:
            begin_tables_again(model, CASES[0].seed)

    cases = [replace(case, steps=6) for case in CASES] if again else CASES
    return [(one["weights"], one["states"]) for one in run_cases(cases, meanwhile=begin)]


def test_tables_that_begin_again_are_as_new():
    once, twice = (run_ranks(2, train_twice, again)[0] for again in (False, True))
    for (weights, states), (others, other_states) in zip(once, twice, strict=True):
        assert all(torch.equal(weights[name], others[name]) for name in weights)
        flat, other = (torch.utils._pytree.tree_leaves(s) for s in (states, other_states))
        assert len(flat) == len(other) > 0
        pairs = zip(flat, other, strict=True)
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


# 8 steps an epoch: resumed at the end of the first, and within the second.
@pytest.mark.parametrize("step, ranks", [(8, 1), (12, 2)])
def test_a_resumed_run_begins_its_tables_again_once(tmp_path, step, ranks):
    overrides = [
        "optim.embedding.begin_again=each_epoch",
        "train.epochs=3",
        "checkpoint.every_steps=4",
        "checkpoint.keep=99",
    ]
    run = tmp_path / "small"

    def train(*more):
        arguments = [tmp_path, [*overrides, *more], ranks]
        run_ranks(ranks, run_small, *arguments) if ranks > 1 else run_small(*arguments)
        return without_times(run), tensors_of(newest(run / "checkpoints"))

    whole = train()
    for path in (run / "checkpoints").iterdir():
        number = int(path.name.split("_")[1])
        if (number if path.name.startswith("step") else 8 * number) > step:
            shutil.rmtree(path)
    resumed = train("checkpoint.resume=auto")
    assert resumed[0] == whole[0]
    assert all(torch.equal(tensor, resumed[1][name]) for name, tensor in whole[1].items())
    # The tables' count of steps has begun again, that of the dense layers has not.
    steps = {int(t) for name, t in whole[1].items() if name.endswith(".step")}
    assert steps == {8, 24}
