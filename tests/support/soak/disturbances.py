"""What happens to a process while it runs the launcher; each a context, with nothing left after it.

A `step` is that before which it happens.
"""

import ctypes
import os
import resource
import shutil
import signal
import subprocess
import time
from contextlib import ExitStack, contextmanager, suppress
from threading import Lock
from unittest import mock

import numpy as np
import pytest
import torch

from stampede.engine import trainer
from stampede.engine.checkpoint.saving import Checkpoints
from support.permissions import read_only
from support.stopping import before_step

_CLONE_NEWNS, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x20000, 1 << 14, 1 << 18, 2


@contextmanager
def at_step(step, action, *arguments):
    """Call something before a step."""
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, step, lambda: action(*arguments))
        yield


def raise_an_error():
    {}["a fault of this test"]


def sleep_in_python():
    time.sleep(3600)


def take_memory_of_torch():
    torch.empty(1 << 50)


def take_memory_of_numpy():
    np.empty(1 << 50, np.uint8)


def end_process():
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def poisoned(step, value):
    """A number of one sample in a batch is not finite."""
    train_step = trainer.train_step

    def poisoning(job, sent, now, *further):
        if now == step:
            sent.batch.dense[0, -1] = value
        return train_step(job, sent, now, *further)

    with mock.patch.object(trainer, "train_step", poisoning):
        yield


@contextmanager
def short_files(step, most):
    """No file may grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with at_step(step, resource.setrlimit, resource.RLIMIT_FSIZE, (most, before[1])):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def lines_behind_a_link(step, run):
    """`metrics.jsonl` is a link, which nothing is written to; after it, it has those it had."""
    metrics, aside = run / "metrics.jsonl", run.parent / "metrics aside"

    def replace():
        # A run may not have a line yet.
        metrics.touch()
        os.replace(metrics, aside)
        metrics.symlink_to("/dev/full")

    try:
        with at_step(step, replace):
            yield
    finally:
        if aside.exists():
            os.replace(aside, metrics)


@contextmanager
def read_only_from(step, folder):
    """Nothing can be made in a folder, nor a file of it be changed, from a step on; 0: at once."""

    def close():
        for path in folder.iterdir():
            if path.is_file():
                path.chmod(0o444)
        within.enter_context(read_only(folder))

    try:
        with ExitStack() as within, at_step(step, close):
            if step == 0:
                close()
            yield
    finally:
        for path in folder.iterdir():
            if path.is_file():
                path.chmod(0o644)


@contextmanager
def disk_filling_up(step, folder, free):
    """A folder lies on a disk that others fill at a step, all but so many bytes; 0: at once.

    What the folder then holds is kept. Only this process sees the disk. It fills between the
    checkpoints: one that was nearly written would make room again, as it replaces an older one.
    """
    write, writing = Checkpoints._write, Lock()

    def write_alone(*arguments):
        with writing:
            write(*arguments)

    def fill():
        with writing:
            _fill(others, free)

    libc, aside = ctypes.CDLL(None, use_errno=True), folder.with_name("aside")
    _checked(libc.unshare(_CLONE_NEWNS))
    _checked(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))
    os.rename(folder, aside)
    folder.mkdir()
    _checked(libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, b"size=20m"))
    others = folder / "others"
    try:
        shutil.copytree(aside, folder, dirs_exist_ok=True)
        if step == 0:
            fill()
        with mock.patch.object(Checkpoints, "_write", write_alone), at_step(step, fill):
            yield
    finally:
        others.unlink(missing_ok=True)
        shutil.rmtree(aside)
        shutil.copytree(folder, aside)
        _checked(libc.umount2(str(folder).encode(), _MNT_DETACH))
        folder.rmdir()
        os.rename(aside, folder)


def _fill(path, free):
    with path.open("wb", buffering=0) as file:
        with suppress(OSError):
            while file.write(bytes(1 << 12)):
                pass
        file.truncate(max(file.tell() - free, 0))


def _checked(result):
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def may_mount(folder):
    """Whether this user may have a disk of its own."""
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", str(folder)]
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True).returncode == 0
