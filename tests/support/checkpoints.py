"""Manifests of checkpoints that are changed, and jobs to save."""

import hashlib
import json
from contextlib import contextmanager

from stampede.engine.job.build import build
from stampede.engine.processes import processes
from stampede.engine.reading import open_dataset
from support.jobs import small_config

WEIGHTS = "front.ebc.embedding_bags.t_C1.weight"


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
