"""Manifests: other formats, changed bits, and checkpoints from elsewhere, which execute nothing."""

import io
import json
import os
import pickle

import pytest
import torch

from stampede.engine.checkpoint import (
    DamagedCheckpointError,
    Progress,
    newest,
    newest_whole,
    read_manifest,
    read_tensors,
    verify,
)
from stampede.engine.errors import RunFolderError
from stampede.engine.processes import processes
from stampede.engine.tables import read_field
from support.checkpoints import WEIGHTS, sign, values_of, weights_of_table, write_checkpoint
from support.guarded import guarded

TENSOR = f"model.{WEIGHTS}"


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "checkpoints/epoch_0001")


def test_every_changed_bit_of_a_manifest_is_found(tmp_path):
    path = write_checkpoint(tmp_path / "epoch_0001")
    content = (path / "manifest.json").read_bytes()
    values = json.loads(content)
    for place in range(0, len(content), 7):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        (path / "manifest.json").write_bytes(changed)
        try:
            assert json.loads(changed) == values
            read_manifest(path)
        except (ValueError, AssertionError):
            with pytest.raises(DamagedCheckpointError, match="damaged checkpoint"):
                read_manifest(path)


def test_no_checkpoint(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RunFolderError, match=r"is not a checkpoint.*write a folder such as"):
            read_manifest(path)


def as_first_format(path):
    values = values_of(path)
    for key in ("format", "versions", "files", "tensors"):
        del values[key]
    (path / "manifest.json").write_text(json.dumps(values))


def as_next_format(path):
    sign(path, {**values_of(path), "format": 3, "more": 1})


@pytest.mark.parametrize(("change", "number"), [(as_first_format, 0), (as_next_format, 3)])
def test_another_format_is_refused_and_not_passed_over(tmp_path, change, number):
    write_checkpoint(tmp_path / "epoch_0001")
    path = write_checkpoint(tmp_path / "epoch_0002", Progress(epoch=2, step=10))
    change(path)
    said = (
        rf"epoch_0002: the checkpoint has format {number}, but .* reads only 1 and 2; "
        "use the version that"
    )
    with pytest.raises(RunFolderError, match=said):
        read_manifest(path)
    with processes("cpu") as here, pytest.raises(RunFolderError, match=said):
        newest_whole(tmp_path, here)
    assert path.exists()


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
    (chunk,) = values["tensors"][TENSOR]["chunks"]
    file = path / chunk["file"]
    chunk["start"], chunk["bytes"] = file.stat().st_size, len(content)
    file.write_bytes(file.read_bytes() + content)
    sign(path, values)
    verify(path)


def read(path):
    found = torch.zeros(7, 12)
    read_tensors(path, {"model": {WEIGHTS: found}}, alone=True)
    return found


def refused(path, said):
    """All ways to read it are refused with a sentence."""
    for way in (lambda: read(path), lambda: read_field(path, "C1")):
        with guarded(path, RunFolderError) as sentences:
            way()
        assert len(sentences) == 1
        assert str(path) in sentences[0] and said in sentences[0]


def test_a_file_larger_than_its_tensors_is_not_read(checkpoint):
    """A sparse one takes no room on the disk, and for ever to be read."""
    values = values_of(checkpoint)
    with (checkpoint / values["files"][0]["name"]).open("r+b") as file:
        file.truncate(1 << 40)
    values["files"][0]["bytes"] = 1 << 40
    sign(checkpoint, values, files=False)
    refused(checkpoint, "files: 1,099,511,627,776 bytes, which is more than the tensors take")


def test_metadata_of_torch_are_never_unpickled(checkpoint, tmp_path):
    # Without it torch's own reader would be at a loss; with it, it executes.
    assert not (checkpoint / ".metadata").exists()
    for name in (".metadata", "__0.metadata"):
        (checkpoint / name).write_bytes(pickle.dumps(Harm(tmp_path / "harm")))
    with guarded(checkpoint):
        assert torch.equal(read(checkpoint), weights_of_table())
    (checkpoint / "manifest.json").unlink()
    refused(checkpoint, "damaged checkpoint (manifest.json: No such file")
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("form", [pickle.dumps, zipped, lambda harm: zipped({"a": harm})])
def test_a_hostile_entry_is_not_executed(checkpoint, tmp_path, form):
    put_into_entry(checkpoint, zipped(weights_of_table() + 1))
    assert torch.equal(read(checkpoint), weights_of_table() + 1)
    put_into_entry(checkpoint, form(Harm(tmp_path / "harm")))
    refused(checkpoint, "an entry is not a tensor")
    assert not (tmp_path / "harm").exists()


def test_an_entry_that_is_another_tensor_is_refused(checkpoint):
    put_into_entry(checkpoint, zipped(torch.ones(7, 11)))
    refused(checkpoint, "damaged checkpoint")


def file_named(name):
    def change(values):
        values["files"][0]["name"] = name
        for tensor in values["tensors"].values():
            for chunk in tensor["chunks"]:
                chunk["file"] = name

    return change


def chunk_in(name):
    return lambda values: values["tensors"][TENSOR]["chunks"][0].update(file=name)


CHANGES = {
    "an absolute path": (file_named("/etc/passwd"), "files.0.name"),
    "a path out of the folder": (file_named("../../canary"), "files.0.name"),
    "a file that is not listed": (chunk_in("../canary"), "is not one of the files"),
    "no progress": (lambda values: values.pop("progress"), "progress"),
    "no table": (lambda values: values["tensors"].pop(TENSOR), "no tensor has the rows of 'C1'"),
    "unknown keys": (lambda values: values.update(more=1), "more"),
    "unknown progress": (lambda values: values["progress"].update(f=1), "progress.f"),
    "steps below zero": (lambda values: values["progress"].update(step=-1), "progress.step"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_manifest_that_cannot_be_is_refused(checkpoint, tmp_path, name):
    change, said = CHANGES[name]
    (tmp_path / "canary").write_bytes(next(checkpoint.glob("*.distcp")).read_bytes())
    values = values_of(checkpoint)
    change(values)
    sign(checkpoint, values, files=False)
    refused(checkpoint, said)
    with pytest.raises(RunFolderError):
        verify(checkpoint)
    assert newest(checkpoint.parent) == checkpoint


def test_what_older_versions_wrote_besides(checkpoint):
    """They took a run that diverged back, and evaluated one part."""
    values = values_of(checkpoint)
    values["progress"].update(rollbacks=1, dense_fraction=0.5, last={"auc": 0.5, "logloss": 0.6})
    sign(checkpoint, values)
    assert read_manifest(checkpoint).progress.last == {"test": {"auc": 0.5, "logloss": 0.6}}


def test_keys_do_nothing_to_a_terminal(checkpoint):
    values = values_of(checkpoint)
    values["tensors"]["\x1b[2J\nall is well"] = {}
    sign(checkpoint, values)
    with pytest.raises(RunFolderError, match=r"x1b\[2J\\nall is well") as refusal:
        read_manifest(checkpoint)
    assert str(refusal.value).isprintable()


def test_a_pipe_does_not_hang(checkpoint):
    file = next(checkpoint.glob("*.distcp"))
    file.unlink()
    os.mkfifo(file)
    refused(checkpoint, "is not a file")
    (checkpoint / "manifest.json").unlink()
    os.mkfifo(checkpoint / "manifest.json")
    refused(checkpoint, "manifest.json: is not a file")
