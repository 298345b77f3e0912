"""Checkpoints of jobs: small ones made by hand, and jobs that are saved and changed at will."""

import hashlib
import json
from contextlib import contextmanager

import torch
import torch.distributed as dist

from stampede.engine.build import build
from stampede.engine.checkpoint import saving
from stampede.engine.checkpoint.manifest import DataEntry, Manifest, Progress, TableEntry, as_text
from stampede.engine.checkpoint.tensors import write_tensors
from stampede.engine.processes import processes
from stampede.engine.reading import open_dataset
from stampede.files import file_entry
from support.jobs import small_config

WEIGHTS = "front.ebc.embedding_bags.t_C1.weight"


def weights_of_table():
    return torch.arange(7 * 12, dtype=torch.float32).view(7, 12)


def write_checkpoint(path, progress=None):
    """A whole checkpoint with one table and little else, by its own code; its path."""
    path.mkdir(parents=True)
    state = {"model": {WEIGHTS: weights_of_table()}, "dense": {"bias": {"step": torch.tensor(3.0)}}}
    with processes("cpu"):
        tensors, names = write_tensors(state, path, dist.group.WORLD)
    table = TableEntry(
        field="C1",
        rows=7,
        columns={"embedding": [0, 10], "first_order": [10, 11], "padding": [11, 12]},
    )
    return _write_manifest(
        path,
        progress or Progress(epoch=1, step=5),
        {"C1": 7},
        config={"train": {"batch_size": 256}},
        tables={"t_C1": table},
        files=[file_entry(path / name, path) for name in names],
        tensors=tensors,
    )


def write_position(folder, epoch, step, samples=0, **more):
    """A checkpoint without any tensor, at a point of a run; its path."""
    reader = {"epoch": epoch, "samples": samples}
    progress = Progress(epoch=epoch, step=step, reader=reader, **more)
    path = folder / saving.name_of(progress)
    path.mkdir(parents=True)
    return _write_manifest(path, progress, {}, config={}, tables={}, files=[], tensors={})


def _write_manifest(path, progress, sizes, **more):
    data = DataEntry(
        vocabulary_sizes=sizes, vocabulary_sha256="", numbers=0, train_rows=5, test_rows=5
    )
    manifest = Manifest(versions={}, progress=progress, data=data, world_size=1, **more)
    (path / "manifest.json").write_text(as_text(manifest))
    return path


def values_of(path):
    """The manifest as it is written, without its own checksum."""
    values = json.loads((path / "manifest.json").read_text())
    del values["sha256"]
    return values


def sign(path, values):
    """Write a manifest with checksums that are right, as someone may who means harm."""
    for entry in values["files"]:
        file = path / entry["name"]
        entry.update(bytes=file.stat().st_size, sha256=_sha256(file.read_bytes()))
    digest = _sha256(json.dumps(values, sort_keys=True).encode())
    (path / "manifest.json").write_text(json.dumps({**values, "sha256": digest}))


def _sha256(content):
    return hashlib.sha256(content).hexdigest()


@contextmanager
def small_job(folder, *overrides, world_size=1):
    """Processes, a job in them, its data set and a folder for its checkpoints."""
    config = small_config(folder, *overrides, world_size=world_size)
    target = folder / "checkpoints"
    with processes("cpu") as here:
        dataset = open_dataset(config, here)
        job = build(config, dataset, here)
        here.on_main(lambda: target.mkdir(exist_ok=True))
        yield here, job, config, dataset, target
