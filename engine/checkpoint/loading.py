"""A job goes on from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from stampede.data import Dataset
from stampede.engine.checkpoint.comparing import check_same_data
from stampede.engine.checkpoint.contents import contents
from stampede.engine.checkpoint.described import data_entry
from stampede.engine.checkpoint.manifest import read_manifest
from stampede.engine.checkpoint.progress import Progress
from stampede.engine.checkpoint.random_state import set_random_state
from stampede.engine.checkpoint.same_network import check_same_network
from stampede.engine.checkpoint.tensors import read_tensors
from stampede.engine.job import Job


def load(path: Path, job: Job, dataset: Dataset) -> Progress:
    """Put a checkpoint into the job, whatever its plan and number of ranks were.

    The state of torch's random generator of the CPU is set where the number of ranks is the same.
    All ranks must call it.

    Returns:
        How far the run had come.

    Raises:
        RunFolderError: it is damaged, or belongs to another job or network.
    """
    manifest = read_manifest(path)
    check_same_data(path, manifest.data, data_entry(dataset))
    state = contents(job, dist.get_rank())
    check_same_network(path, manifest, state["model"])
    if manifest.world_size != dist.get_world_size():
        del state["random"]
    read_tensors(path, state)
    job.model.load_state_dict(state["model"])
    # FBGEMM's own Adam counts its steps outside of its state.
    taken = manifest.progress.step - manifest.progress.skipped_batches
    job.model.fused_optimizer.set_optimizer_step(taken)
    for generator_state in state.get("random", {}).values():
        set_random_state(path, generator_state)
    return manifest.progress
