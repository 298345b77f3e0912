"""A step: batches sent ahead, tiles on a CPU, rows that take their steps later."""

import json
from itertools import islice
from unittest import mock

import pytest
import torch

from stampede.data import GlobalBatches
from stampede.engine import step as step_module
from stampede.engine.step import prefetch, train_step
from stampede.engine.tables import read_field
from stampede.models import CTRModel
from stampede.models.embedding_front import EmbeddingFront
from stampede.optim import CowClipTables, local_cowclip_tables
from support.checkpoints import small_job
from support.jobs import run_small, small_config, train_an_epoch, without_times
from support.updated_tables import computed


def test_a_batch_is_sent_before_the_previous_one_is_computed():
    happened, read = [], []

    def batches():
        for number in range(3):
            read.append(number)
            batch = mock.Mock(sparse=number)
            batch.to.return_value = batch
            yield batch

    front = mock.Mock()
    front.send.side_effect = lambda sparse: happened.append(f"sent {sparse}")
    for one in prefetch(batches(), front, torch.device("cpu"), lambda: len(read)):
        happened.append(f"step {one.batch.sparse} of {one.position}")
    assert happened == [
        *("sent 0", "sent 1", "step 0 of 1"),
        *("sent 2", "step 1 of 2"),
        "step 2 of 3",
    ]


def test_all_fields_with_their_first_order_weights_are_looked_up_at_once(tmp_path):
    with small_job(tmp_path) as (_, job, config, dataset, _):
        (tables,) = local_cowclip_tables(job.model)
        (array,) = tables.arrays
        assert len(array.weights) == sum(dataset.vocabulary_sizes.values())
        assert array.weights.shape[1] > config.model.dim and len(array.shards) == 26
        batch = next(
            GlobalBatches(dataset.train, list(dataset.vocabulary_sizes), 25, 0, 1).epoch(0)
        )
        calls = []
        tables.register_forward_hook(lambda *_: calls.append(1))
        rows = job.front.lookup(batch.sparse).rows
    assert len(calls) == 1 and rows.shape == (25, 26 * array.weights.shape[1])


def test_tables_of_split_columns_are_looked_up_by_torchrec(tmp_path):
    with small_job(tmp_path, "sharding.plan=column_wise") as (_, job, *_):
        assert job.front.local is None


@pytest.mark.slow
def test_rows_of_this_rank_alone_are_those_that_torchrec_looks_up(tmp_path):
    found = []
    for way in ("local", "torchrec"):
        folder = tmp_path / way
        folder.mkdir()
        with small_job(folder, "sharding.plan=table_wise") as (here, job, _, dataset, _):
            assert job.front.local is not None
            if way == "torchrec":
                job.front.local = None
            batches = GlobalBatches(dataset.train, list(dataset.vocabulary_sizes), 64, 0, 1)
            sent = islice(prefetch(batches, job.front, here.device), 3)
            losses = [train_step(job, one, step, here) for step, one in enumerate(sent, 1)]
            tables = [whole for t in local_cowclip_tables(job.model) for whole in whole_of(t)]
            found.append([*losses, *tables])
    assert len(found[0]) > 3
    assert all(map(torch.equal, *found))


def whole_of(tables):
    """Weights and states of tables."""
    tables.flush()
    return [whole.clone() for array in tables.arrays for whole in array.all_tensors()]


BATCH = 256


def trained_in_tiles(folder, monkeypatch, rows):
    """What an epoch leaves, and samples in the order in which they were looked up and computed."""
    order = []
    logits, lookup = CTRModel.logits, EmbeddingFront.lookup_sent

    def noted_logits(model, part, *rest, **named):
        order.append(("dense", len(part)))
        return logits(model, part, *rest, **named)

    def noted_lookup(front, ids):
        found = lookup(front, ids)
        order.append(("lookup", len(found.rows)))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(step_module, "TILE_ROWS", rows)
        patch.setattr(CTRModel, "logits", noted_logits)
        patch.setattr(EmbeddingFront, "lookup_sent", noted_lookup)
        folder.mkdir()
        trained = train_an_epoch(small_config(folder, f"train.batch_size={BATCH}"))
    # Planning computes before the first lookup.
    return trained, order[order.index(("lookup", BATCH)) :]


@pytest.mark.slow
def test_tiles_make_one_step_of_the_whole_batch(tmp_path, monkeypatch):
    """Rows are clipped from the start: by counts, and by the norm of the gradient, of the batch."""
    whole, order = trained_in_tiles(tmp_path / "whole", monkeypatch, BATCH)
    assert order[:3] == [("lookup", BATCH), ("dense", BATCH), ("lookup", BATCH)]
    found, order = trained_in_tiles(tmp_path / "tiles", monkeypatch, 100)
    a_step = [("lookup", BATCH), *(("dense", size) for size in (100, 100, 56))]
    assert order[: 2 * len(a_step)] == 2 * a_step
    assert found.losses == pytest.approx(whole.losses, rel=1e-6)
    torch.testing.assert_close(found.dense, whole.dense, rtol=1e-4, atol=2e-6)
    for field, weights in whole.tables.items():
        for one, other in zip(found.tables[field], weights, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-6)


FIELDS = ("C1", "C3", "C10")


def run_in(way, folder, *parts):
    """One run, or one that is interrupted and continued; its metrics and tables."""
    folder.mkdir()
    with computed(way, window=4):
        for overrides in parts:
            run_small(folder, ["evaluate.every=3", "train.batch_size=64", *overrides])
    checkpoint = folder / "small/checkpoints/epoch_0002"
    tables = [part for field in FIELDS for part in read_field(checkpoint, field)]
    return without_times(folder / "small"), tables


@pytest.mark.slow
def test_rows_that_wait_give_the_bits_of_a_sweep_also_after_a_resume(tmp_path):
    swept = run_in("kernels", tmp_path / "swept", ["train.epochs=2"])
    parts = ["train.epochs=1"], ["train.epochs=2", "checkpoint.resume=auto"]
    metrics, tables = run_in("waiting", tmp_path / "run", *parts)
    assert metrics == swept[0]
    assert all(map(torch.equal, tables, swept[1]))


@pytest.mark.slow
def test_rows_keep_waiting_after_an_epoch_without_an_evaluation(tmp_path, monkeypatch):
    flushes, flush = set(), CowClipTables.flush

    def counted(tables):
        flushes.add(int(tables.step_count))
        flush(tables)

    monkeypatch.setattr(CowClipTables, "flush", counted)
    with computed("waiting", window=4):
        run_small(tmp_path, ["train.epochs=4", "evaluate.every_epochs=2", "train.batch_size=64"])
    steps = json.loads((tmp_path / "small/summary.json").read_text())["steps"]
    ends = {steps * epoch // 4 for epoch in range(1, 5)}
    assert flushes & ends == {steps * epoch // 4 for epoch in (2, 4)}
