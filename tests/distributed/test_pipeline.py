"""TorchRec's train pipeline runs with our sharders and batches, and changes no result."""

import torch
from torch.nn import functional
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from stampede.data import GlobalBatches
from stampede.engine.build import build
from stampede.engine.datasets import open_dataset
from stampede.engine.processes import processes
from stampede.engine.step import train_step
from stampede.models import CTRModel
from stampede.optim import local_cowclip_tables
from support.jobs import small_config


def test_pipeline_gives_the_weights_of_the_plain_loop(tmp_path, monkeypatch):
    config = small_config(tmp_path)
    with processes("cpu") as here:
        dataset = open_dataset(config, here)
        fields = list(dataset.vocabulary_sizes)

        def batches():
            return GlobalBatches(dataset.train, fields, 256, 0, 1).epoch(0)

        job = build(config, dataset, here)
        for step, batch in enumerate(batches(), 1):
            train_step(job, batch, step, here)
        expected = local_cowclip_tables(job.model)[0].table.weights.clone()

        forward = CTRModel.forward

        def loss_of_batch(model, batch):
            """The pipeline wants a model that takes a batch and returns (loss, output)."""
            logits = forward(model, batch.sparse, batch.dense)
            losses = functional.binary_cross_entropy_with_logits(
                logits, batch.label, reduction="none"
            )
            return (losses * batch.weight).sum() / batch.global_samples, logits

        monkeypatch.setattr(CTRModel, "forward", loss_of_batch)
        job = build(config, dataset, here)
        pipeline = TrainPipelineSparseDist(
            job.model, job.dense_optimizer, here.device, execute_all_batches=True
        )
        stream, steps = batches(), 0
        while True:
            try:
                pipeline.progress(stream)
            except StopIteration:
                break
            steps += 1
        assert steps == 8
        assert len(pipeline._pipelined_modules) == 1
        found = local_cowclip_tables(job.model)[0].table.weights
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
