"""Manifests: other formats, changed bits, and checkpoints from elsewhere, which execute nothing."""

import io
import json
import os
import pickle

import pytest
import torch

from stampede.engine.checkpoint.manifest import DamagedCheckpointError, read_manifest
from stampede.engine.checkpoint.retention import newest_whole
from stampede.engine.checkpoint.tensors import read_tensors
from stampede.engine.errors import RunFolderError
from support.checkpoints import WEIGHTS, sign, values_of, weights_of_table, write_checkpoint


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "checkpoints/epoch_0001")


def read(path):
    found = torch.zeros(7, 12)
    read_tensors(path, {"model": {WEIGHTS: found}}, alone=True)
    return found


def test_every_changed_bit_is_found(checkpoint):
    content = (checkpoint / "manifest.json").read_bytes()
    values = json.loads(content)
    for place in range(0, len(content), 7):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        (checkpoint / "manifest.json").write_bytes(changed)
        try:
            assert json.loads(changed) == values
            read_manifest(checkpoint)
        except (ValueError, AssertionError):
            with pytest.raises(DamagedCheckpointError, match="damaged checkpoint"):
                read_manifest(checkpoint)


def test_an_unknown_format_is_refused_rather_than_skipped(checkpoint):
    write_checkpoint(checkpoint.parent / "epoch_0000")
    sign(checkpoint, {**values_of(checkpoint), "format": 3, "more": 1})
    said = r"epoch_0001: the checkpoint has format 3, but .* reads only 2; use the version"
    with pytest.raises(RunFolderError, match=said):
        newest_whole(checkpoint.parent)
    assert checkpoint.exists()


class Harm:
    """What unpickling executes."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def zipped(content):
    """As torch saves it."""
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def put_into_entry(path, content):
    """Let the table's entry be these bytes, all checksums right."""
    values = values_of(path)
    (chunk,) = values["tensors"][f"model.{WEIGHTS}"]["chunks"]
    file = path / chunk["file"]
    chunk["start"], chunk["bytes"] = file.stat().st_size, len(content)
    file.write_bytes(file.read_bytes() + content)
    sign(path, values)


def test_nothing_is_executed(checkpoint, tmp_path):
    harm = Harm(tmp_path / "harm")
    # torch's own reader would unpickle them.
    for name in (".metadata", "__0.metadata"):
        (checkpoint / name).write_bytes(pickle.dumps(harm))
    put_into_entry(checkpoint, zipped(weights_of_table() + 1))
    assert torch.equal(read(checkpoint), weights_of_table() + 1)
    for form in (pickle.dumps(harm), zipped(harm), zipped({"a": harm}), zipped(torch.ones(7, 11))):
        put_into_entry(checkpoint, form)
        with pytest.raises(DamagedCheckpointError, match="damaged checkpoint"):
            read(checkpoint)
    assert not (tmp_path / "harm").exists()
