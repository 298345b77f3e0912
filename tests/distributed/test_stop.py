"""A loss that is not finite stops all ranks at one step, before it."""

import torch

from stampede.data import GlobalBatches
from stampede.engine.build import build
from stampede.engine.datasets import open_dataset
from stampede.engine.errors import TrainingStoppedError
from stampede.engine.processes import processes
from stampede.engine.step import train_step
from stampede.optim import local_cowclip_tables
from support.jobs import small_config
from support.ranks import run_ranks


def poison_rank_1(folder):
    """Train until it stops; what the stop said, and whether the weights are as before the step."""
    config = small_config(folder, "sharding.plan=row_wise", world_size=2)
    with processes("cpu") as here:
        dataset = open_dataset(config, here)
        job = build(config, dataset, here)
        batches = GlobalBatches(dataset.train, list(dataset.vocabulary_sizes), 256, here.rank, 2)
        for step, batch in enumerate(batches.epoch(0), 1):
            if step == 3 and here.rank == 1:
                batch.dense[0, 0] = float("nan")
            weights = [p.detach() for p in job.dense_parameters.values()]
            weights += [t.table.weights for t in local_cowclip_tables(job.model)]
            before = [w.clone() for w in weights]
            try:
                train_step(job, batch, step, here)
            except TrainingStoppedError as stop:
                same = all(torch.equal(*pair) for pair in zip(before, weights, strict=True))
                return str(stop), same
    return None


def test_one_poisoned_rank_stops_both(tmp_path):
    first, second = run_ranks(2, poison_rank_1, tmp_path)
    assert first == second
    said, untouched = first
    assert "nan at step 3" in said and untouched
