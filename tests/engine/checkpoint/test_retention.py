"""Which checkpoints a run keeps, which is the newest, and how damaged ones are found."""

import shutil

import pytest
import torch

from stampede.engine.checkpoint import retention, tensors
from stampede.engine.checkpoint.manifest import (
    DamagedCheckpointError,
    Progress,
    read_manifest,
)
from stampede.engine.checkpoint.retention import (
    being_read,
    checkpoint_of,
    name_of,
    newest,
    newest_whole,
    prune,
    verify,
)
from stampede.engine.checkpoint.tensors import read_tensors
from stampede.engine.config import CheckpointSection
from stampede.engine.errors import RunFolderError
from stampede.files import delete_folder
from support.checkpoints import WEIGHTS, weights_of_table, write_checkpoint, write_position


def names(folder):
    return {path.name for path in folder.iterdir()}


def settings(**keys):
    return CheckpointSection(**keys)


@pytest.mark.parametrize(
    ("progress", "name"),
    [
        (Progress(epoch=3, step=30), "epoch_0003"),
        (Progress(epoch=3, step=30, reader={"epoch": 3, "samples": 0}), "epoch_0003"),
        (Progress(epoch=3, step=33, reader={"epoch": 3, "samples": 512}), "step_00000033"),
        # All batches are trained on, but the epoch is not evaluated yet.
        (Progress(epoch=3, step=40, reader={"epoch": 4, "samples": 0}), "step_00000040"),
        (Progress(epoch=3, step=123456789, reader={"epoch": 3, "samples": 1}), "step_123456789"),
    ],
)
def test_names(progress, name):
    assert name_of(progress) == name


def test_the_newest_has_the_most_steps_whatever_its_name(tmp_path):
    assert newest(tmp_path / "nowhere") is None
    assert newest(tmp_path) is None
    write_position(tmp_path, 2, 20)
    write_position(tmp_path, 10, 100)
    assert newest(tmp_path).name == "epoch_0010"
    write_position(tmp_path, 1, 15, samples=8)
    assert newest(tmp_path).name == "epoch_0010"
    write_position(tmp_path, 10, 105, samples=8)
    assert newest(tmp_path).name == "step_00000105"
    # More digits than the name has room for.
    write_position(tmp_path, 10, 123_456_789, samples=8)
    assert newest(tmp_path).name == "step_123456789"
    write_position(tmp_path, 11, 123_456_789)
    assert newest(tmp_path).name == "epoch_0011"
    write_position(tmp_path, 13, 999_999_999).rename(tmp_path / ".epoch_0013.tmp")
    assert newest(tmp_path).name == "epoch_0011"
    # One that cannot be read may be newer; who reads it is told.
    (write_position(tmp_path, 5, 50) / "manifest.json").write_text("{}")
    assert newest(tmp_path).name == "epoch_0005"
    # So may one whose manifest is lost.
    (tmp_path / "epoch_0012").mkdir()
    assert newest(tmp_path).name == "epoch_0012"


def fill(folder, epochs):
    """Two checkpoints within each epoch, and one at its end."""
    for epoch in range(epochs):
        for step in (3, 6):
            write_position(folder, epoch, 10 * epoch + step, samples=8)
        write_position(folder, epoch + 1, 10 * (epoch + 1))


def test_the_newest_the_best_and_every_third_epoch_are_kept(tmp_path):
    fill(tmp_path, 8)
    # What cannot be read is left alone and does not count.
    (write_position(tmp_path, 9, 70) / "manifest.json").write_text("{}")
    prune(tmp_path, settings(keep=2, keep_every=3), best_epoch=2)
    kept = {"epoch_0002", "epoch_0003", "epoch_0006", "epoch_0009"}
    assert names(tmp_path) == {*kept, "step_00000076", "epoch_0008"}
    assert checkpoint_of(tmp_path, 3) == tmp_path / "epoch_0003"
    assert checkpoint_of(tmp_path, 4) is None
    # A step whose number is that of the best epoch is none.
    write_position(tmp_path, 8, 82, samples=8)
    prune(tmp_path, settings(keep=1), best_epoch=8)
    assert names(tmp_path) == {"epoch_0008", "epoch_0009", "step_00000082"}


def test_a_checkpoint_in_use_is_kept_until_it_is_closed(tmp_path):
    fill(tmp_path, 2)
    path, held = being_read(lambda: tmp_path / "epoch_0001")
    again, also_held = being_read(lambda: tmp_path / "epoch_0001")
    assert path == again == tmp_path / "epoch_0001"
    for handle in (held, also_held):
        prune(tmp_path, settings(keep=1), best_epoch=0)
        assert names(tmp_path) == {"epoch_0001", "epoch_0002"}
        handle.close()
    prune(tmp_path, settings(keep=1), best_epoch=0)
    assert names(tmp_path) == {"epoch_0002"}


def test_another_is_chosen_if_one_is_deleted_before_it_is_locked(tmp_path):
    fill(tmp_path, 2)
    choices = iter(["epoch_0009", "epoch_0002"])
    path, held = being_read(lambda: tmp_path / next(choices))
    assert path.name == "epoch_0002"
    held.close()
    assert being_read(lambda: tmp_path / "epoch_0009") == (tmp_path / "epoch_0009", None)


def test_a_checkpoint_deleted_meanwhile_is_not_the_newest(tmp_path, monkeypatch):
    fill(tmp_path, 2)

    def deleted_meanwhile(path):
        if path.name == "step_00000003":
            delete_folder(path)
        return read_manifest(path)

    monkeypatch.setattr(retention, "read_manifest", deleted_meanwhile)
    assert newest(tmp_path).name == "epoch_0002"


def test_copies_under_other_names_are_left_alone(tmp_path):
    fill(tmp_path, 2)
    others = {"step_00000016_backup", "epoch_archive", "epoch_9", "step_9999999", "epoch_0002 2"}
    for name in others:
        shutil.copytree(tmp_path / "epoch_0002", tmp_path / name)
    (tmp_path / "epoch_archive/manifest.json").unlink()
    assert newest(tmp_path).name == "epoch_0002"
    prune(tmp_path, settings(keep=2), best_epoch=0)
    assert names(tmp_path) == {"epoch_0002", "step_00000016", *others}


def tensors_file(path):
    return next(path.glob("*.distcp"))


def shortened(path):
    file = tensors_file(path)
    file.write_bytes(file.read_bytes()[:-1])


def flipped(path):
    file = tensors_file(path)
    content = bytearray(file.read_bytes())
    # Within the numbers of the table, where nothing but the checksum can tell.
    content[content.index(weights_of_table().numpy().tobytes()) + 9] ^= 4
    file.write_bytes(content)


def vanished(path):
    tensors_file(path).unlink()


def cut(path):
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text[: len(text) // 2])


def manifest_vanished(path):
    (path / "manifest.json").unlink()


DAMAGES = [shortened, flipped, vanished, cut, manifest_vanished]


def at(step):
    return Progress(epoch=step // 5, step=step)


def whole(folder):
    write_checkpoint(folder / "epoch_0001", at(5))
    return write_checkpoint(folder / "epoch_0002", at(10))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_named_and_the_one_before_is_used(tmp_path, capsys, damage):
    path = whole(tmp_path)
    assert newest_whole(tmp_path) == path
    damage(path)
    if damage is not flipped:
        with pytest.raises(RunFolderError, match=r"epoch_0002: damaged checkpoint \(.*delete it"):
            read_tensors(path, {"model": {WEIGHTS: torch.zeros(7, 12)}}, alone=True)
    with pytest.raises(DamagedCheckpointError, match=r"epoch_0002: damaged checkpoint \("):
        verify(path)
    assert newest_whole(tmp_path) == tmp_path / "epoch_0001"
    said = capsys.readouterr().out
    assert "epoch_0002: damaged checkpoint (" in said
    assert "epoch_0001 is used" in said
    # It must not be among the newest that are kept, nor in the way of a new one of its name.
    assert names(tmp_path) == {"epoch_0001", ".epoch_0002.damaged"}
    damage(tmp_path / "epoch_0001")
    for _ in range(2):
        with pytest.raises(RunFolderError, match=r"epoch_0001: damaged.*\n.*run.overwrite=true"):
            newest_whole(tmp_path)
        # Left alone: it may be mended.
        assert (tmp_path / "epoch_0001").exists()


def test_lack_of_memory_does_not_count_as_damage(tmp_path, monkeypatch):
    def lacking(*_):
        raise RuntimeError("DefaultCPUAllocator: no")

    path = write_checkpoint(tmp_path / "epoch_0001")
    monkeypatch.setattr(tensors.Reader, "read_data", lacking)
    with pytest.raises(MemoryError, match="DefaultCPUAllocator: no"):
        read_tensors(path, {"model": {WEIGHTS: torch.zeros(7, 12)}}, alone=True)
