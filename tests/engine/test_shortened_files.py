"""Data files that are shortened while they are mapped: a sentence instead of SIGBUS or of zeros."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from stampede.data import DataError
from stampede.data.prepared.reader import open_prepared
from support.paths import ROOT
from support.prepared import drawn_fields, drawn_rows, write_prepared
from support.reading import OVERRIDES

ROWS = 20_000


def large(folder, multi=0, weight=False):
    """A folder whose training part is one shard, of files that are longer than a page."""
    parts = {
        "train": drawn_rows(ROWS, multi=multi, weight=weight),
        "test": drawn_rows(500, multi=multi, weight=weight, seed=1),
    }
    return write_prepared(folder, parts, drawn_fields(multi=multi))


@pytest.mark.parametrize(
    "name", ["ids", "numbers", "label", "weight", "offsets_0", "values_0", "offsets_1", "values_1"]
)
def test_zeros_are_not_taken_for_data(tmp_path, name):
    """Up to the end of its page a shortened file reads as zeros."""
    data = large(tmp_path / "data", multi=2, weight=True)
    part = open_prepared(data).train
    path = data / f"train-0-{name}.npy"
    # Within a page, so that reading does not end in SIGBUS.
    page = os.sysconf("SC_PAGE_SIZE")
    length = path.stat().st_size
    left = length - min(100, length % page - 1)
    rows = torch.arange(ROWS)
    assert len(part.read(rows).label) == ROWS
    os.truncate(path, left)
    with pytest.raises(DataError) as refusal:
        part.read(rows)
    said = f"{path}: was shortened to {left:,} bytes while it was being read; delete the folder"
    assert str(refusal.value).startswith(said)
    assert f"--verify {data}" in str(refusal.value)
    if name == "weight":
        with pytest.raises(DataError, match="was shortened"):
            part.weight(rows)


def test_only_the_shards_that_are_read_are_looked_at(tmp_path):
    parts = {"train": drawn_rows(60), "test": drawn_rows(20)}
    data = write_prepared(tmp_path / "data", parts, drawn_fields(), shard_rows=30)
    part = open_prepared(data).train
    os.truncate(data / "train-1-ids.npy", 140)
    assert len(part.read(torch.arange(30)).label) == 30
    with pytest.raises(DataError, match=r"train-1-ids\.npy: was shortened"):
        part.read(torch.arange(31))


def launched(folder, data, *overrides, wait, then):
    """A run that something is done to once it has logged; its exit status and errors."""
    (folder / "small.yaml").write_text("")
    with subprocess.Popen(
        [sys.executable, ROOT / "launch.py", folder / "small.yaml", "data.kind=prepared",
         f"data.path={data}", f"run.dir={folder}/runs", *OVERRIDES, "train.epochs=100000",
         "train.log_every=50", "evaluate.every_epochs=100000", *overrides],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=ROOT,
    ) as process:  # fmt: skip
        try:
            deadline = time.monotonic() + 200
            while process.poll() is None and not wait() and time.monotonic() < deadline:
                time.sleep(0.05)
            then()
            _, said = process.communicate(timeout=100)
        finally:
            process.kill()
    return process.returncode, said


@pytest.mark.parametrize("left", [4096, 12 * ROWS + 100])
def test_a_file_that_is_shortened_during_a_run(tmp_path, left):
    """By pages, which is SIGBUS, and by a few bytes."""
    data = large(tmp_path / "data")
    path, saved = data / "train-0-ids.npy", tmp_path / "runs/small/checkpoints"
    status, said = launched(
        tmp_path,
        data,
        "data.residence=disk",
        "checkpoint.every_steps=20",
        wait=lambda: list(saved.glob("step_*")),
        then=lambda: os.truncate(path, left),
    )
    assert status == 2, said
    assert f"error: {path}: was shortened to {left:,} bytes while it was being read" in said
    assert "Traceback" not in said
    assert list(saved.glob("step_*"))


READS = """
import mmap, os, sys, threading
from pathlib import Path

import numpy as np
import torch

from stampede.data.prepared.reader import open_prepared
from stampede.engine.watchdog.bus_error import bus_errors_explained

folder, how = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dataset = open_prepared(folder)
(shard,) = dataset.train.shards
other = folder / "other"
other.write_bytes(bytes(1 << 20))
with other.open("rb") as file:
    foreign = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def read():
    if how == "holding":
        # With the lock of Python's interpreter, which this thread does not let go.
        return int(shard.maps["ids"][-1, -1])
    if how == "torch":
        return shard.arrays["ids"].index_select(0, torch.arange(19_000, 20_000)).sum()
    if how == "foreign":
        return foreign[-1]
    return dataset.train.read(torch.arange(19_000, 20_000))


with bus_errors_explained(dataset):
    print("begun")
    os.truncate(other if how == "foreign" else folder / "train-0-ids.npy", 4096)
    if how == "thread":
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    else:
        read()
    print("not to be reached")
"""


def reads(folder, how):
    return subprocess.run(
        [sys.executable, "-c", READS, str(folder), how],
        capture_output=True, text=True, cwd=ROOT, timeout=100,
    )  # fmt: skip


@pytest.mark.parametrize("how", ["holding", "torch", "gathering", "thread"])
def test_who_reads_what_is_gone_says_which_file(tmp_path, how):
    done = reads(large(tmp_path / "data"), how)
    assert done.returncode == 2, done.stderr
    assert done.stdout == "begun\n"
    path = tmp_path / "data/train-0-ids.npy"
    assert f"\nerror: {path}: was shortened to 4,096 bytes while it was" in done.stderr


def test_any_other_bus_error_ends_the_process_as_ever(tmp_path):
    done = reads(large(tmp_path / "data"), "foreign")
    assert done.returncode == -signal.SIGBUS
    assert "shortened" not in done.stderr


def test_the_handler_is_as_before_once_nothing_is_read(tmp_path):
    code = (
        "import ctypes, signal, sys\n"
        "from pathlib import Path\n"
        "from stampede.data.prepared.reader import open_prepared\n"
        "from stampede.engine.watchdog.bus_error import bus_errors_explained\n"
        "signal.signal(signal.SIGBUS, lambda *_: print('called'))\n"
        "with bus_errors_explained(open_prepared(Path(sys.argv[1]))):\n"
        "    pass\n"
        "signal.raise_signal(signal.SIGBUS)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(large(tmp_path / "data"))],
        capture_output=True, text=True, cwd=ROOT, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "called\n"), done.stderr
