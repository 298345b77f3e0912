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
    assert update_kernel._backwards(tables, lookups)() > 0
    by_table = zip(before, tables.split_embedding_weights(), lookups.ids[0].split(32), strict=True)
    for then, now, ids in by_table:
        changed = (then != now).any(1).nonzero().flatten()
        assert changed.tolist() == ids.unique().tolist()


def test_the_parts_of_our_update_are_within_it():
    import update_kernel

    found = update_kernel.measure_backward(64, 5000, repeats=2)
    assert set(found["seconds"]) == {"fbgemm", "stampede", "torch"}
    assert set(found["parts"]) == {"sum by row", "check", "clip and step", "rest"}
    assert min(found["parts"].values()) > 0
    assert len(found["all_seconds"]["torch"]) == 2


def test_all_rows_are_trained_in_four_ways():
    import update_kernel

    found = update_kernel.measure_all_rows(64, 5000, steps=3, repeats=1)
    assert set(found["seconds_per_step"]) == {"touched", "deferred", "swept", "torch"}


@pytest.mark.slow
def test_waiting_rows_are_measured_beside_a_sweep_and_the_choice_beside_the_better_one(
    monkeypatch,
):
    import waiting_rows

    from stampede.optim import waiting_rows as rows

    swept, end_step = [], rows.WaitingRows.end_step

    def noted(waiting, *, is_swept):
        swept.append(is_swept or not waiting.defers)
        end_step(waiting, is_swept=is_swept)

    monkeypatch.setattr(rows.WaitingRows, "end_step", noted)
    monkeypatch.setattr(rows, "FEWEST_ROWS", 0)
    # A batch that would be swept, and one that would not.
    for batch, chosen in ((512, "swept"), (16, "waiting")):
        swept.clear()
        found = waiting_rows.measure(5000, batch, repeats=1)
        assert set(found["seconds_per_step"]) == {"waiting", "swept"}
        assert found["chosen"] == chosen
        assert swept.count(True) == swept.count(False) == 2 * found["steps"]
    # Few rows are swept, whatever the batch.
    monkeypatch.setattr(rows, "FEWEST_ROWS", 1 << 16)
    found = waiting_rows.measure(5000, 16, repeats=1)
    assert found["chosen"] == "swept"
    point = {**found, "seconds_per_step": {"waiting": 2e-3, "swept": 3e-3}}
    assert waiting_rows.chosen_to_better(point) == 1.5
    assert waiting_rows.chosen_to_better({**point, "chosen": "waiting"}) == 1
