"""Disks that are full, files that may not grow, folders that are read-only."""

from functools import partial

from support.soak.cases import STEPS
from support.soak.disturbances import (
    disk_filling_up,
    lines_behind_a_link,
    read_only_from,
    short_files,
)
from support.soak.faults.kind import Meeting, kind


@kind("disk full", 14, 1, begun=True, needs_disk=True)
def disk_full(case):
    """No checkpoint fits on it any more, and perhaps not even a line."""
    size = sum(path.stat().st_size for path in case.checkpoint.iterdir())
    free = case.draw.choice([case.draw.randrange(16384), case.draw.randrange(size)])
    yield Meeting(
        "No space left on device",
        disturbance=partial(disk_filling_up, case.a_step(1), case.runs, free),
    )


@kind("disk full from the start", 6, 1, begun=True, needs_disk=True)
def disk_full_from_the_start(case):
    free = case.draw.choice([0, case.draw.randrange(16384)])
    yield Meeting(
        "No space left on device", disturbance=partial(disk_filling_up, 0, case.runs, free)
    )


@kind("log made a link", 8, 1)
def log_made_a_link(case):
    yield Meeting(
        r"results cannot be written \(is a link, which is not followed\)",
        disturbance=partial(lines_behind_a_link, case.a_step(), case.run),
    )


@kind("file size limited", 10, 1, begun=True)
def file_size_limited(case):
    largest = max(path.stat().st_size for path in case.checkpoint.iterdir())
    # What this process says goes into files as well.
    most = case.draw.randrange(30_000, largest)
    yield Meeting("File too large", disturbance=partial(short_files, case.a_step(1), most))


@kind("folder read-only from the start", 6, 2, begun=True)
def read_only_from_the_start(case):
    folder = case.draw.choice([case.run, case.run / "checkpoints"])
    yield Meeting("Permission denied", disturbance=partial(read_only_from, 0, folder))


@kind("folder read-only from a step on", 10, 1, begun=True)
def read_only_from_a_step_on(case):
    folder = case.draw.choice([case.run, case.run / "checkpoints"])
    disturbance = partial(read_only_from, case.draw.randrange(19, STEPS - 9), folder)
    yield Meeting("Permission denied", disturbance=disturbance)
