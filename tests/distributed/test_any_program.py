"""Any small TorchRec program trains as plain float64 PyTorch, or is refused as the manual says."""

from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from support.any_program import Program, deviation_of, run_programs
from support.one_table import CLASSES
from support.parity import TOLERANCE, Table
from support.parity_cases import PLANS
from support.ranks import run_ranks

pytestmark = pytest.mark.slow

OF_SEQUENCES = ("data_parallel", "table_wise", "row_wise", "column_wise")
CLIPS = [
    {"granularity": "none"},
    {"granularity": "row", "threshold": 0.1},
    {"granularity": "cowclip", "ratio": 0.3},
    {"granularity": "cowclip", "ratio": 0.3, "variant": "paper"},
]


@st.composite
def programs(draw):
    """A program; of those that the manual refuses, few."""
    sequence = draw(st.booleans())
    dim = draw(st.sampled_from([4, 8, 12]))
    tables = tuple(
        Table(
            rows=draw(st.sampled_from([1, 2, 7, 30])),
            dim=dim if sequence else draw(st.sampled_from([4, 8, 12])),
            features=draw(st.integers(1, 2)),
            mean=not sequence and draw(st.booleans()),
        )
        for _ in range(draw(st.integers(1, 3)))
    )
    kinds = st.sampled_from(OF_SEQUENCES if sequence else PLANS)
    plan = tuple(draw(kinds) for _ in tables)
    if draw(st.booleans()):
        plan = plan[:1] * len(tables)
    passes, combined = draw(st.integers(1, 3)), draw(st.booleans())
    # Without the tables' optimizer a first step is told by all its passes.
    counts = st.integers(1, passes)
    of_steps = (draw(counts) if combined else passes, draw(counts), draw(counts))
    ids = st.sampled_from([torch.int32, torch.int64])
    return Program(
        plan,
        tables,
        draw(st.sampled_from([*CLASSES])),
        draw(st.sampled_from(CLIPS)) | {"rows": draw(st.sampled_from(["all", "touched"]))},
        sequence=sequence,
        weighted=not sequence and draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        shared=len(tables) > 1 and draw(st.booleans()),
        ids=draw(ids),
        lengths=draw(ids),
        repeats=not sequence and draw(st.booleans()),
        passes=passes,
        of_steps=of_steps,
        combined=combined,
        schedule=draw(st.booleans()),
        other=draw(st.booleans()),
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("ranks, several", [(1, 8), (2, 16)])
def test_it_trains_as_in_float64(ranks, several):
    # A start of processes takes longer than many programs; the first list is that of the simplest.
    @settings(max_examples=2, phases=[Phase.explicit, Phase.generate])
    @given(st.lists(programs(), min_size=several, max_size=several, unique_by=repr))
    def many(tried):
        for program, found in zip(tried, run_ranks(ranks, run_programs, tried)[0], strict=True):
            assert isinstance(found, str) == program.is_refused, (program, found)
            if isinstance(found, str):
                assert "mean pooling" in found
            else:
                assert deviation_of(program, found, ranks) < TOLERANCE, program

    many()


def test_a_wrong_training_would_be_noticed():
    program = Program(
        ("row_wise", "data_parallel"),
        (Table(30, 8, features=2), Table(7, 4)),
        arguments={"granularity": "cowclip", "ratio": 0.3},
        weighted=True,
        shared=True,
        repeats=True,
        passes=3,
        of_steps=(3, 2, 3),
        schedule=True,
        other=True,
    )
    (found,) = run_ranks(1, run_programs, [program])[0]
    assert deviation_of(program, found, 1) < TOLERANCE
    for other in ({"schedule": False}, {"of_steps": (3, 3, 3)}, {"passes": 2}, {"weighted": False}):
        assert deviation_of(replace(program, **other), found, 1) > 100 * TOLERANCE
    for wrong in ({"granularity": "none"}, {"rows": "touched"}, {"force_counts": 1}):
        assert deviation_of(program, found, 1, **wrong) > 100 * TOLERANCE


@pytest.mark.parametrize("plan, means", [
    ("row_wise", (False, True, False)), ("table_row_wise", (True, False, False)),
    ("row_wise", (True, True, False)),
])  # fmt: skip
def test_mean_pooling_by_rows_is_refused_beside_a_sum_of_the_same_feature(plan, means):
    tables = tuple(Table(9, 4, mean=mean) for mean in means)
    by_rows = Program(plan, tables, shared=True, of_steps=(1,))
    whole = replace(by_rows, plan="table_wise")
    together = replace(by_rows, tables=tuple(Table(9, 4, mean=True) for _ in means))
    refused, *found = run_ranks(1, run_programs, [by_rows, whole, together])[0]
    assert "tables 't0' and 't2' have the feature 'f0_0' in common" in refused
    for program, of_program in zip((whole, together), found, strict=True):
        assert deviation_of(program, of_program, 1) < TOLERANCE
