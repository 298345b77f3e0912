"""Runs whose tables are updated as on a GPU: queued, here for Triton's interpreter."""

from unittest import mock

import polars as pl
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from stampede.data import GlobalBatches
from stampede.engine import step as step_module
from stampede.engine.errors import TrainingStoppedError
from stampede.engine.step import send, train_step
from stampede.engine.training.diverging_loss import count_if_skipped
from stampede.engine.training.progress import Progress
from stampede.optim import local_cowclip_tables, nonfinite
from stampede.optim.sharded.backward_update import UpdateQueue
from support.checkpoints import small_job
from support.jobs import lines, run_small
from support.updated_tables import computed
from support.waits import noted_waits

# The interpreter takes its time.
FEW = [
    *("data.rows=100", "data.test_rows=100", "data.scale=0.00002", "data.validation_fraction=0"),
    *("train.batch_size=25", "evaluate.select_on=test"),
]


@pytest.mark.slow
def test_a_run_is_that_of_the_cpu(tmp_path):
    """With tables of several widths, and a frozen one, which does not stop the others."""
    end_step = UpdateQueue.end_step
    vectors = {"id": [0, 1, 2], "vector": torch.ones(3, 10).tolist()}
    pl.DataFrame(vectors).write_parquet(tmp_path / "vectors.parquet")
    frozen = f"{{path: {tmp_path}/vectors.parquet, train: false}}"
    more = ["model.dims={C1: 3, C2: 17}", f"model.pretrained={{C3: {frozen}}}"]
    for way in ("kernels", "queued"):
        with computed(way), mock.patch.object(UpdateQueue, "end_step", autospec=True) as queued:
            queued.side_effect = end_step
            run_small(tmp_path, [*FEW, *more, "evaluate.every=2", f"run.name={way}"])
        assert bool(queued.call_count) == (way == "queued")
    for one, other in zip(lines(tmp_path / "queued"), lines(tmp_path / "kernels"), strict=True):
        for key in {"loss", "logloss", "auc", "clipped_share"} & one.keys():
            assert one[key] == pytest.approx(other[key], rel=1e-5)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_the_configuration_chooses_the_kernels(kernels, tmp_path):
    made = small_job(tmp_path, *FEW, f"run.kernels={kernels}")
    with computed("queued"), made as (_, job, *_):
        assert (job.table_update.flag is not None) == (kernels == "triton")


def _poison_loss(batch, patch):
    batch.dense[1, 0] = float("nan")


def _poison_gradient(batch, patch):
    """The loss stays finite, and so do the gradients of the dense layers."""
    compute = step_module._dense_pass

    def poisoned(*given):
        loss, grads = compute(*given)
        grads[0][1, 0] = float("inf")
        return loss, grads

    patch.setattr(step_module, "_dense_pass", poisoned)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["kernels", "queued"])
@pytest.mark.parametrize(
    "poison, says",
    [(_poison_loss, "optim.dense.lr"), (_poison_gradient, "optim.embedding.on_nonfinite=skip_row")],
)
def test_a_nonfinite_step_changes_no_weights(way, poison, says, tmp_path, monkeypatch):
    """It is named at once or, where updates are queued, some steps later."""
    monkeypatch.setattr(nonfinite, "LATE", 1)
    made = small_job(tmp_path, *FEW, "train.batch_size=10")
    with computed(way), made as (here, job, _, dataset, _):
        batches = GlobalBatches(dataset.train, list(dataset.vocabulary_sizes), 10, 0, 1)
        weights = [*job.dense_parameters.values(), *local_cowclip_tables(job.model)]
        before = None
        with pytest.raises(TrainingStoppedError, match=f"step 3.*{says}") as stop:
            for step, batch in enumerate(batches.epoch(0), 1):
                with monkeypatch.context() as patch:
                    if step == 3:
                        poison(batch, patch)
                        before = [_values(held) for held in weights]
                    train_step(job, send(batch, job.front, here.device), step, here)
        assert step == 3 + (way == "queued")
        of_loss = way == "kernels" and poison is _poison_loss
        assert ("the loss is nan" in str(stop.value)) == of_loss
        assert all(map(torch.equal, before, [_values(held) for held in weights]))


@pytest.mark.wide
@pytest.mark.parametrize(
    "way, precision", [("queued", "fp32"), ("queued", "bf16"), ("kernels", "fp32")]
)
def test_a_step_does_not_wait_for_the_device_nor_for_other_processes(
    way, precision, tmp_path, monkeypatch
):
    made = small_job(tmp_path, *FEW, f"train.precision={precision}")
    with computed(way), made as (here, job, _, dataset, _):
        batches = GlobalBatches(dataset.train, list(dataset.vocabulary_sizes), 25, 0, 1)
        first, second, *_ = (send(batch, job.front, here.device) for batch in batches.epoch(0))
        train_step(job, first, 1, here)
        on_cpu = [state["step"] for state in job.dense_optimizer.state.values()]
        for tables in local_cowclip_tables(job.model):
            on_cpu += [tables.step_count, tables.learning_rate_tensor]
        exchanges = []
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: exchanges.append(1))
        with noted_waits(on_cpu) as waits:
            job.set_learning_rates(embedding=1e-4, dense=1e-3)
            loss = train_step(job, second, 2, here)
            job.skips_nonfinite and count_if_skipped(loss, Progress())
    assert bool(waits) == (way == "kernels")
    assert not exchanges


def _values(held):
    whole = held.weights_tensor() if hasattr(held, "weights_tensor") else held
    return whole.detach().clone()


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 4])
def test_an_evaluation_waits_for_the_queued_steps(tmp_path, monkeypatch, step):
    """Within an epoch and at its end."""
    read = GlobalBatches._read

    def poisoned(batches, epoch, start):
        batch = read(batches, epoch, start)
        if start == 25 * (step - 1) and batches._batch_size == 25:
            batch.dense[0, 0] = float("nan")
        return batch

    monkeypatch.setattr(GlobalBatches, "_read", poisoned)
    with computed("queued"), pytest.raises(TrainingStoppedError, match=f"step {step}: "):
        run_small(tmp_path, [*FEW, f"evaluate.every={step}"])
    kinds = [line["kind"] for line in lines(tmp_path / "small")]
    assert kinds[-1] == "stopped" and "evaluation" not in kinds
