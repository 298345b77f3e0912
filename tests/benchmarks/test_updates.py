"""Benchmarks of the update of tables alone: what they measure takes place, and adds up."""

import pytest


@pytest.mark.parametrize("make", ["ours", "fbgemms"])
def test_contenders_of_the_update_change_the_rows_of_the_batch(make):
    import update_kernel
    from clicks import cardinalities

    sizes = cardinalities(5000)
    lookups = update_kernel.Lookups(32, sizes, 1)
    tables = {"ours": lambda: update_kernel.ours(sizes, "touched")}.get(
        make, lambda: update_kernel.fbgemms(sizes)
    )()
    before = [weights.clone() for weights in tables.split_embedding_weights()]
    assert update_kernel.backwards(tables, lookups)() > 0
    by_table = zip(before, tables.split_embedding_weights(), lookups.ids[0].split(32), strict=True)
    for then, now, ids in by_table:
        changed = (then != now).any(1).nonzero().flatten()
        assert changed.tolist() == ids.unique().tolist()


def test_the_update_and_whole_steps_are_measured():
    import update_kernel
    from clicks import cardinalities

    sizes = cardinalities(5000)
    found = update_kernel.measure_backward(64, sizes, repeats=2)
    assert set(found["seconds"]) == {"fbgemm", "stampede", "torch"}
    assert len(found["all_seconds"]["torch"]) == 2
    found = update_kernel.measure_steps(64, sizes, steps=3, repeats=1)
    assert set(found["seconds_per_step"]) == {"touched", "deferred", "swept"}
