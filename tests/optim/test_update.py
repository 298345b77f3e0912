"""The update of a table against float64 plain PyTorch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stampede.optim.update as update
from stampede.optim import CowClip
from stampede.optim.rows import sum_by_row
from stampede.optim.update import TableState, UpdateSettings, update_
from support.reference import ReferenceTable


@st.composite
def rules(draw):
    """Settings of the update, as ours and as the reference's arguments."""
    clip = draw(
        st.none()
        | st.builds(
            CowClip,
            ratio=st.sampled_from([0.01, 0.5, 1.0]),
            bound=st.sampled_from([0.0, 1e-5, 0.05]),
            variant=st.sampled_from(["reference", "paper"]),
            columns=st.sampled_from([None, 1, 2]),
        )
    )
    return UpdateSettings(
        betas=draw(st.sampled_from([(0.9, 0.999), (0.0, 0.5)])),
        eps=1e-7,
        # 1e-2 with ratio 0.01: the decay itself is clipped, also in rows without gradient.
        l2=draw(st.sampled_from([0.0, 1e-5, 1e-2])),
        clip=clip,
        rows=draw(st.sampled_from(["all", "touched"])),
        eps_placement=draw(st.sampled_from(["keras", "torch"])),
    )


def reference_arguments(rule):
    arguments = {
        "l2": rule.l2,
        "betas": rule.betas,
        "eps": rule.eps,
        "rows": rule.rows,
        "eps_placement": rule.eps_placement,
    }
    if rule.clip is not None:
        arguments |= {
            "ratio": rule.clip.ratio,
            "bound": rule.clip.bound,
            "variant": rule.clip.variant,
            "columns": rule.clip.columns,
        }
    return arguments


def dense(batch, rows, dim):
    grad = torch.zeros(rows, dim, dtype=batch.grads.dtype)
    counts = torch.zeros(rows, dtype=torch.int64)
    grad[batch.rows], counts[batch.rows] = batch.grads, batch.counts
    return grad, counts


@settings(max_examples=60, deadline=None)
@given(
    rule=rules(),
    rows=st.integers(1, 9),
    dim=st.integers(2, 7),
    occurrences=st.integers(0, 12),
    seed=st.integers(0, 2**31),
)
def test_follows_the_equations(rule, rows, dim, occurrences, seed):
    draw = torch.Generator().manual_seed(seed)
    # Row norms over four decades: some rows are clipped, some are not.
    start = torch.randn(rows, dim, generator=draw, dtype=torch.float64)
    start *= 10.0 ** -torch.randint(0, 4, (rows, 1), generator=draw)
    table = TableState(start.clone(), torch.zeros_like(start), torch.zeros_like(start))
    reference = ReferenceTable(start)
    for step in range(1, 5):
        ids = torch.randint(0, rows, (occurrences,), generator=draw)
        grads = torch.randn(occurrences, dim, generator=draw, dtype=torch.float64) * 0.1
        batch = sum_by_row(ids, grads)
        update_(table, batch, rule, lr=1e-2, step=step)
        reference.step(*dense(batch, rows, dim), step, lr=1e-2, **reference_arguments(rule))
    torch.testing.assert_close(table.weights, reference.weights, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(table.exp_avg, reference.m, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(table.exp_avg_sq, reference.v, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("ratio", [1.0, 0.001])
def test_blocks_of_the_sweep_do_not_show(monkeypatch, ratio):
    rule = UpdateSettings(l2=1e-2, clip=CowClip(ratio=ratio, bound=0.0))
    results = []
    for elements in (7, 1 << 20):
        monkeypatch.setattr(update, "SWEEP_ELEMENTS", elements)
        start = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
        table = TableState(start, torch.zeros_like(start), torch.zeros_like(start))
        for step in (1, 2):
            batch = sum_by_row(torch.tensor([3, 3, 9]), torch.ones(3, 4))
            update_(table, batch, rule, lr=1e-2, step=step)
        results.append(table.weights)
    torch.testing.assert_close(*results)


def test_clipped_rows_are_counted():
    start = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    table = TableState(start, torch.zeros_like(start), torch.zeros_like(start))
    batch = sum_by_row(torch.tensor([0, 1]), torch.tensor([[5.0, 0.0], [0.5, 0.0]]))
    rule = UpdateSettings(clip=CowClip())
    assert update_(table, batch, rule, lr=1e-3, step=1).item() == 1


def test_memory_of_the_sweep_does_not_grow_with_the_table():
    """No gradient of the table's size is made."""
    rows, dim = 1_000_000, 12
    table = TableState(*(torch.zeros(rows, dim) for _ in range(3)))
    batch = sum_by_row(torch.tensor([5]), torch.ones(1, dim))
    with torch.profiler.profile(profile_memory=True) as profile:
        update_(table, batch, UpdateSettings(l2=1e-5), lr=1e-3, step=1)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())
    assert allocated < table.weights.nbytes / 4
