"""Jobs on prepared data, in one process or as a rank of several."""

from pathlib import Path

from stampede.engine.run import run
from support.jobs import small_config
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
    given = ["data.kind=prepared", f"data.path={data}", *overrides]
    return small_config(folder, *given, world_size=world_size, job=OVERRIDES)


def run_prepared(folder, data, overrides, world_size=1):
    """A whole run, as the launcher does it."""
    run(prepared_config(folder, data, *overrides, world_size=world_size))
