"""Every benchmark at a size of seconds: what it measures takes place; what all of them share."""

import end_to_end
import manual_tables
import pytest
import steps
import update_kernel
from clicks import cardinalities, write_clicks
from communication import summarize, train_and_wait

from support.paths import ROOT
from support.ranks import run_ranks


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    """A prepared folder with 5 tables."""
    return write_clicks(tmp_path_factory.mktemp("clicks"), rows=2048, ids=4000, fields=5)


OVERRIDES = ["train.batch_size=256", "model.hidden=[16,16]"]


def test_the_parts_of_a_step_are_the_whole_step(clicks):
    overrides = [f"data.path={clicks}", *OVERRIDES]
    parts = steps.parts_of_a_step(overrides, batch=256, steps=10)
    assert sum(parts[name] for name in steps.PARTS) == pytest.approx(parts["step"])
    assert all(parts[name] > 0 for name in steps.PARTS)


@pytest.mark.slow
def test_ranks_wait_for_each_other_and_repeat_their_exchanges(clicks):
    overrides = [f"data.path={clicks}", *OVERRIDES]
    overrides += ["evaluate.batch_size=256", "sharding.plan=table_wise"]
    ranks = run_ranks(2, train_and_wait, overrides, 3)
    for rank in ranks:
        assert 0 < rank["waited"] < rank["seconds"]
        assert rank["alone"] > 0 and rank["processor_seconds"] > 0
        # The dense layers' gradients: 5 fields of 10 columns and 13 numbers in.
        dense = 63 * 16 + 16 + 16 * 16 + 16 + 16 + 1 + 13
        assert 4 * dense <= rank["sent_bytes"]["all_reduce"] < 4 * dense + 200
        assert rank["sent_bytes"]["all_to_all_single"] > 0
    found = summarize(ranks, 3)
    assert found["waits_per_step"] >= 3


@pytest.mark.wide
def test_the_launcher_and_its_peer_train_on_the_same_clicks(clicks, tmp_path):
    for name in ("1024 fp32 all", "1024 sparse_adam keeps memory"):
        assert end_to_end.train(name, clicks, tmp_path) > 0
    # The run folder, with its checkpoints, is gone.
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_the_memory_of_a_training_is_more_than_its_tables(clicks, monkeypatch):
    # It would set the allocator of this process, which goes on with other tests.
    monkeypatch.setattr(steps, "keep_freed_memory", lambda: None)
    found = steps.time_and_memory(clicks, 256, 2, trained=3)
    # Weights and two moments of 12 columns.
    assert found["peak_bytes"] > found["table_bytes"] == 144 * found["ids"]
    more = {**found, "ids": found["ids"] + 1000, "peak_bytes": found["peak_bytes"] + 150_000}
    assert steps.bytes_per_id({"20": more, "1": found}) == 150


def test_the_manual_shows_the_committed_results():
    for name in manual_tables.PAGES:
        page = (ROOT / name).read_text(encoding="utf-8")
        shown = page.split(manual_tables.BEGIN)[1].split(manual_tables.END)[0].strip()
        expected = manual_tables.page_tables(name, manual_tables.RESULTS)
        assert shown == expected, "run python benchmarks/manual_tables.py --write"


@pytest.mark.parametrize("make", ["ours", "fbgemms"])
def test_contenders_of_the_update_change_the_rows_of_the_batch(make):
    sizes = cardinalities(5000)
    lookups = update_kernel.Lookups(32, sizes, 1)
    tables = getattr(update_kernel, make)(sizes, *(["touched"] if make == "ours" else []))
    before = [weights.clone() for weights in tables.split_embedding_weights()]
    assert update_kernel.backwards(tables, lookups)() > 0
    after, of_tables = tables.split_embedding_weights(), lookups.ids[0].split(32)
    for then, now, ids in zip(before, after, of_tables, strict=True):
        assert (then != now).any(1).nonzero().flatten().tolist() == ids.unique().tolist()


def test_the_update_and_whole_steps_are_measured():
    sizes = cardinalities(5000)
    found = update_kernel.measure_backward(64, sizes, repeats=2)
    assert set(found["seconds"]) == {"fbgemm", "stampede", "torch"}
    assert len(found["all_seconds"]["torch"]) == 2
    found = update_kernel.measure_steps(64, sizes, steps=3, repeats=1)
    assert set(found["seconds_per_step"]) == {"touched", "deferred", "swept"}
