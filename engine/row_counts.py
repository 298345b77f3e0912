"""Rows that the tables' optimizer has touched, clipped and left out, over all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from stampede.engine.checkpoint import Progress
from stampede.engine.job import Job
from stampede.optim import local_cowclip_tables


def add_row_counts(progress: Progress, job: Job, device: torch.device) -> None:
    """Add to the progress what the tables of all ranks counted since the last call.

    All ranks must call it.
    """
    counts = torch.zeros(3, dtype=torch.int64, device=device)
    for tables in local_cowclip_tables(job.model):
        counts += tables.row_counts
        tables.row_counts.zero_()
    dist.all_reduce(counts)
    touched, clipped, skipped = counts.tolist()
    progress.touched_rows += touched
    progress.clipped_rows += clipped
    progress.skipped_rows += skipped
