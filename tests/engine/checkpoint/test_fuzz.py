"""Checkpoints changed at random places, by someone who knows all checksums."""

import json
import shutil
from dataclasses import asdict

import pytest
import torch
from hypothesis import strategies as st

from stampede.data import Order
from stampede.engine.checkpoint import newest, read_manifest, read_tensors, verify
from stampede.engine.checkpoint.names import name_of
from stampede.engine.errors import RunFolderError
from stampede.engine.evaluate import Plateau
from stampede.engine.tables import read_field
from support.checkpoints import WEIGHTS, sign, values_of, write_checkpoint
from support.fuzzing import NUMBERS, VALUES, changed_bytes, changed_trees, fuzz
from support.guarded import guarded

CASES = [300, pytest.param(10_000, marks=pytest.mark.soak)]

NAMES = ["../canary", "../../canary", "/canary", "a/../../canary", ".", "..", "", "/dev/zero",
         "manifest.json", "__0_0.distcp", "a/b/c", "x" * 300, "\n", "é"]  # fmt: skip

SNIPPETS = [b"\0", b"\xff", b"NaN", b"-", b"1e999", b"[" * 5000, b'{"a":' * 5000, b"\\ud800",
            b"9" * 5000, b",", b"null"]  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path):
    path = write_checkpoint(tmp_path / "checkpoints/epoch_0001")
    shutil.copy(next(path.glob("*.distcp")), tmp_path / "canary")
    shutil.copy(next(path.glob("*.distcp")), tmp_path / "checkpoints/canary")
    return path


def read_all(path):
    """Everything that opens a checkpoint."""
    newest(path.parent)
    progress = read_manifest(path).progress
    # What a run that goes on makes of it.
    name_of(progress)
    Plateau(**progress.plateau)
    if progress.reader.get("order"):
        Order(**progress.reader["order"]).deciding()
    read_field(path, "C1")
    read_tensors(path, {"model": {WEIGHTS: torch.zeros(7, 12)}}, alone=True)
    verify(path)


def sentence(path):
    with guarded(path.parent, RunFolderError) as said:
        read_all(path)
    return said[0] if said else None


@pytest.mark.parametrize("cases", CASES)
def test_manifests(checkpoint, cases):
    whole = values_of(checkpoint)
    order = asdict(Order(5, "block"))
    reader = {"epoch": 1, "samples": 0, "batch_size": 4, "order": order,
              "settings": {"shuffle": "block", "memory_gb": 1.0}}  # fmt: skip
    whole["progress"].update(reader=reader, plateau=asdict(Plateau(0.5, 1)))
    values = st.sampled_from(NUMBERS) | st.sampled_from(NAMES) | VALUES
    keys = ["offsets", "sizes", "size", "chunks", "file", "rows", "t_C1", f"model.{WEIGHTS}",
            "samples", "epoch", "order", "plateau"]  # fmt: skip

    def check(changed):
        sign(checkpoint, changed, files=False)
        return sentence(checkpoint)

    seen = fuzz(changed_trees([whole], values, keys).filter(_is_mapping), check, cases)
    assert seen["accepted"] > cases / 100 and len(seen) > cases**0.4, seen


def _is_mapping(values):
    return isinstance(values, dict)


@pytest.mark.parametrize("cases", CASES)
def test_bytes_of_manifests(checkpoint, cases):
    content = (checkpoint / "manifest.json").read_bytes()

    def check(changed):
        (checkpoint / "manifest.json").write_bytes(changed)
        return sentence(checkpoint)

    seen = fuzz(changed_bytes(content, SNIPPETS), check, cases)
    # Changed checksums are not forgiven, so that only what was not changed is accepted.
    assert 0 < seen["accepted"] < cases / 2, seen


@pytest.mark.parametrize("cases", CASES)
def test_bytes_of_tensors(checkpoint, cases):
    (file,) = checkpoint.glob("*.distcp")
    content, whole = file.read_bytes(), values_of(checkpoint)
    # A pickle of torch is among them: what it names, it may not get.
    snippets = [
        b"cos\nsystem\n", b"cposix\nsystem\nX\x06\x00\x00\x00canary\x85R.", b"PK\x03\x04",
        b"PK\x05\x06", b"\x80\x02", b"\xff" * 8, b"ctorch\nload\n", b"r\xff\xff\xff\x7f",
    ]  # fmt: skip

    def check(changed):
        file.write_bytes(changed)
        values = json.loads(json.dumps(whole))
        for tensor in values["tensors"].values():
            for chunk in tensor["chunks"]:
                # Where bytes came or went, the last entry ends at the end of the file.
                chunk["bytes"] += max(len(changed) - len(content), 0) * (chunk["start"] > 0)
        sign(checkpoint, values)
        return sentence(checkpoint)

    seen = fuzz(changed_bytes(content, snippets), check, cases)
    assert seen["accepted"] > cases / 100 and len(seen) > cases**0.3, seen
