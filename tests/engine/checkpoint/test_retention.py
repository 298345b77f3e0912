"""Which checkpoints a run keeps, which is the newest, and how damaged ones are found."""

import shutil

import pytest
import torch

from stampede.engine.checkpoint import retention, tensors
from stampede.engine.checkpoint.manifest import DamagedCheckpointError, Progress, read_manifest
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


@pytest.mark.parametrize(
    ("progress", "name"),
    [
        (Progress(epoch=3, step=30), "epoch_0003"),
        (Progress(epoch=3, step=33, reader={"epoch": 3, "samples": 512}), "step_00000033"),
        # All batches are trained on, but the epoch is not evaluated yet.
        (Progress(epoch=3, step=40, reader={"epoch": 4, "samples": 0}), "step_00000040"),
    ],
)
def test_names(progress, name):
    assert name_of(progress) == name


def test_the_newest_has_the_most_steps_whatever_its_name(tmp_path):
    assert newest(tmp_path / "nowhere") is None
    for epoch, step, samples, name in (
        (2, 20, 0, "epoch_0002"),
        (10, 100, 0, "epoch_0010"),
        (1, 15, 8, "epoch_0010"),
        (10, 105, 8, "step_00000105"),
        # More digits than the name has room for.
        (10, 123_456_789, 8, "step_123456789"),
        (11, 123_456_789, 0, "epoch_0011"),
    ):
        write_position(tmp_path, epoch, step, samples=samples)
        assert newest(tmp_path).name == name
    # What a kill in a save leaves does not count, and is removed when a run goes on.
    left = write_position(tmp_path, 13, 999_999_999).rename(tmp_path / ".epoch_0013.tmp")
    assert newest(tmp_path).name == "epoch_0011"
    assert newest_whole(tmp_path).name == "epoch_0011" and not left.exists()
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
    prune(tmp_path, CheckpointSection(keep=2, keep_every=3), best_epoch=2)
    kept = {"epoch_0002", "epoch_0003", "epoch_0006", "epoch_0009"}
    assert names(tmp_path) == {*kept, "step_00000076", "epoch_0008"}
    assert checkpoint_of(tmp_path, 3) == tmp_path / "epoch_0003"
    assert checkpoint_of(tmp_path, 4) is None
    # A step whose number is that of the best epoch is none.
    write_position(tmp_path, 8, 82, samples=8)
    prune(tmp_path, CheckpointSection(keep=1), best_epoch=8)
    assert names(tmp_path) == {"epoch_0008", "epoch_0009", "step_00000082"}


def test_a_checkpoint_in_use_is_kept_until_it_is_closed(tmp_path):
    fill(tmp_path, 2)
    handles = [being_read(lambda: tmp_path / "epoch_0001")[1] for _ in range(2)]
    for handle in handles:
        prune(tmp_path, CheckpointSection(keep=1), best_epoch=0)
        assert names(tmp_path) == {"epoch_0001", "epoch_0002"}
        handle.close()
    prune(tmp_path, CheckpointSection(keep=1), best_epoch=0)
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
    prune(tmp_path, CheckpointSection(keep=2), best_epoch=0)
    assert names(tmp_path) == {"epoch_0002", "step_00000016", *others}


def flipped(content):
    # Within the numbers of the table, where nothing but the checksum can tell.
    place = content.index(weights_of_table().numpy().tobytes()) + 9
    return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


def damage(path, pattern, change):
    (file,) = path.glob(pattern)
    content = change(file.read_bytes())
    file.unlink() if content is None else file.write_bytes(content)


@pytest.mark.parametrize(
    "pattern, change",
    [
        ("*.distcp", lambda content: content[:-1]),
        ("*.distcp", flipped),
        ("*.distcp", lambda _: None),
        ("manifest.json", lambda content: content[: len(content) // 2]),
        ("manifest.json", lambda _: None),
    ],
    ids=["shortened", "flipped", "vanished", "manifest cut", "manifest vanished"],
)
def test_a_damaged_one_is_named_and_the_one_before_is_used(tmp_path, capsys, pattern, change):
    write_checkpoint(tmp_path / "epoch_0001", Progress(epoch=1, step=5))
    path = write_checkpoint(tmp_path / "epoch_0002", Progress(epoch=2, step=10))
    assert newest_whole(tmp_path) == path
    damage(path, pattern, change)
    if change is not flipped:
        with pytest.raises(RunFolderError, match=r"epoch_0002: damaged checkpoint \(.*delete it"):
            read_tensors(path, {"model": {WEIGHTS: torch.zeros(7, 12)}}, alone=True)
    with pytest.raises(DamagedCheckpointError, match=r"epoch_0002: damaged checkpoint \("):
        verify(path)
    assert newest_whole(tmp_path) == tmp_path / "epoch_0001"
    said = capsys.readouterr().out
    assert "epoch_0002: damaged checkpoint (" in said and "epoch_0001 is used" in said
    # It must not be among the newest that are kept, nor in the way of a new one of its name.
    assert names(tmp_path) == {"epoch_0001", ".epoch_0002.damaged"}
    damage(tmp_path / "epoch_0001", pattern, change)
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
