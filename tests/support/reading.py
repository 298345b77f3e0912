"""Jobs on prepared data, in one process or as a rank of several."""

import os
from pathlib import Path

import numpy as np
import torch

from stampede.data import DataError
from stampede.engine.build import build
from stampede.engine.config.load import load_config
from stampede.engine.processes import processes
from stampede.engine.reading import Reader, open_dataset
from stampede.engine.run import run
from stampede.engine.step import send, train_step
from support.jobs import train_an_epoch
from support.prepared import drawn_fields, drawn_rows, write_prepared

OVERRIDES = [
    "preset=paper",
    "train.epochs=1",
    "run.name=small",
    "model.hidden=[8,8]",
    # Small enough that some rows are clipped from the start.
    "model.init_std=1e-4",
    "train.batch_size=64",
    "evaluate.batch_size=32",
    "evaluate.select_on=test",
    "evaluate.compare_with_lr=false",
    "optim.embedding.lr=1e-2",
    "optim.dense.lr=1e-3",
    "optim.dense.schedule.warmup=0",
]


def prepared(folder: Path, train=333, test=67, single=3, multi=2, weight=True, change=None, **more):
    """A prepared folder; `change` alters the arrays of the training part."""
    parts = {
        name: drawn_rows(rows, single, multi=multi, weight=weight, seed=seed, **more)
        for seed, (name, rows) in enumerate({"train": train, "test": test}.items())
    }
    if change is not None:
        change(parts["train"])
    return write_prepared(folder, parts, drawn_fields(single, multi), 100)


def prepared_config(folder: Path, data: Path, *overrides: str, world_size: int = 1):
    """A configuration of a job on a prepared folder."""
    path = folder / "small.yaml"
    # All ranks do so at a time: none may read what another has half written.
    mine = folder / f"small_{os.getpid()}.yaml"
    mine.write_text(f"data: {{kind: prepared, path: {data}}}")
    mine.replace(path)
    return load_config(path, [f"run.dir={folder}", *OVERRIDES, *overrides], world_size)


def run_prepared(folder, data, overrides, world_size=1):
    """A whole run, as the launcher does it."""
    run(prepared_config(folder, data, *overrides, world_size=world_size))


def refusal_of(data, world_size):
    """What a rank is told of a folder that cannot be used, and whether all know of it."""
    data = Path(data)
    config = prepared_config(data.parent, data, world_size=world_size)
    with processes("cpu") as here:
        try:
            open_dataset(config, here)
        except DataError as failure:
            return str(failure), failure.known_to_all_ranks


def train_prepared(folder, data, overrides=(), world_size=1):
    """An epoch on a prepared folder."""
    return train_an_epoch(prepared_config(folder, data, *overrides, world_size=world_size))


def batches_of_this_rank(folder, data, overrides, world_size, epochs, state=None, stop=None):
    """Rows of this rank's batches, by their first number, and the reader's state after them."""
    config = prepared_config(folder, data, *overrides, world_size=world_size)
    with processes("cpu") as here:
        batches = Reader(config, open_dataset(config, here), here).training()
        if state is not None:
            batches.load_state_dict(state)
        seen = []
        for _ in range(epochs):
            for batch in batches:
                seen.append(batch.dense[: batch.samples, 0].long().tolist())
                if len(seen) == stop:
                    return seen, batches.state_dict()
        return seen, batches.state_dict()


def first_loss_and_its_parts(folder, data):
    """Loss of the first step beside logits, labels and weights of its batch, in numpy."""
    config = prepared_config(folder, data)
    with processes("cpu") as here:
        dataset = open_dataset(config, here)
        job = build(config, dataset, here)
        batch = next(iter(Reader(config, dataset, here).training()))
        with torch.no_grad():
            logits = job.model(batch.sparse, batch.dense)
        parts = [np.asarray(part) for part in (logits, batch.label, batch.weight)]
        loss = train_step(job, send(batch, job.front, here.device), 1, here).item()
        finite = all(bool(p.isfinite().all()) for p in job.dense_parameters.values())
        return loss, parts, finite
