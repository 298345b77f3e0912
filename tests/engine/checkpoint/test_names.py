"""Names of checkpoints, which is the newest, and which are kept."""

import shutil

import pytest

from stampede.engine import checkpoint
from stampede.engine.checkpoint import Progress
from stampede.engine.checkpoint.keeping import prune, set_aside
from stampede.engine.checkpoint.names import name_of
from stampede.engine.config import CheckpointSection
from stampede.files import recover_folders
from support.checkpoints import write_position


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
    assert checkpoint.newest(tmp_path / "nowhere") is None
    assert checkpoint.newest(tmp_path) is None
    write_position(tmp_path, 2, 20)
    write_position(tmp_path, 10, 100)
    assert checkpoint.newest(tmp_path).name == "epoch_0010"
    write_position(tmp_path, 1, 15, samples=8)
    assert checkpoint.newest(tmp_path).name == "epoch_0010"
    write_position(tmp_path, 10, 105, samples=8)
    assert checkpoint.newest(tmp_path).name == "step_00000105"
    # More digits than the name has room for.
    write_position(tmp_path, 10, 123_456_789, samples=8)
    assert checkpoint.newest(tmp_path).name == "step_123456789"
    write_position(tmp_path, 11, 123_456_789)
    assert checkpoint.newest(tmp_path).name == "epoch_0011"
    # Without a name there is none.
    (tmp_path / "epoch_0012").touch()
    write_position(tmp_path, 13, 999_999_999).rename(tmp_path / ".epoch_0013.tmp")
    assert checkpoint.newest(tmp_path).name == "epoch_0011"
    # One that cannot be read may be newer; who reads it is told.
    (write_position(tmp_path, 5, 50) / "manifest.json").write_text("{}")
    assert checkpoint.newest(tmp_path).name == "epoch_0005"
    # So may one whose manifest is lost.
    (tmp_path / "epoch_0012").unlink()
    (tmp_path / "epoch_0012").mkdir()
    assert checkpoint.newest(tmp_path).name == "epoch_0012"


def test_the_checkpoint_of_an_epoch(tmp_path):
    path = write_position(tmp_path, 2, 20)
    assert checkpoint.checkpoint_of(tmp_path, 2) == path
    assert checkpoint.checkpoint_of(tmp_path, 3) is None


def fill(folder, epochs):
    """Two checkpoints within each epoch, and one at its end."""
    for epoch in range(epochs):
        for step in (3, 6):
            write_position(folder, epoch, 10 * epoch + step, samples=8)
        write_position(folder, epoch + 1, 10 * (epoch + 1))


def test_the_newest_are_kept_those_within_an_epoch_among_them(tmp_path):
    fill(tmp_path, 3)
    prune(tmp_path, settings(keep=2), best_epoch=0)
    assert names(tmp_path) == {"epoch_0003", "step_00000026"}


def test_the_best_and_every_third_epoch_are_kept_besides(tmp_path):
    fill(tmp_path, 8)
    prune(tmp_path, settings(keep=1, keep_every=3), best_epoch=2)
    assert names(tmp_path) == {"epoch_0002", "epoch_0003", "epoch_0006", "epoch_0008"}
    # A step whose number is that of the best epoch is none.
    write_position(tmp_path, 8, 82, samples=8)
    prune(tmp_path, settings(keep=1), best_epoch=8)
    assert names(tmp_path) == {"epoch_0008", "step_00000082"}


def test_what_cannot_be_read_is_left_alone_and_does_not_count(tmp_path):
    fill(tmp_path, 2)
    (write_position(tmp_path, 9, 90) / "manifest.json").write_text("{}")
    prune(tmp_path, settings(keep=1), best_epoch=0)
    assert names(tmp_path) == {"epoch_0002", "epoch_0009"}


def test_copies_by_other_names_are_their_owners(tmp_path):
    fill(tmp_path, 2)
    others = {"step_00000016_backup", "epoch_archive", "epoch_9", "step_9999999", "epoch_0002 2"}
    for name in others:
        shutil.copytree(tmp_path / "epoch_0002", tmp_path / name)
    (tmp_path / "epoch_archive/manifest.json").unlink()
    assert checkpoint.newest(tmp_path).name == "epoch_0002"
    prune(tmp_path, settings(keep=2), best_epoch=0)
    assert names(tmp_path) == {"epoch_0002", "step_00000016", *others}


def test_damaged_ones_are_set_aside_side_by_side(tmp_path):
    for number in range(3):
        path = write_position(tmp_path, 1, 10)
        (path / "which").write_text(str(number))
        set_aside(path)
    kept = {path.name: (path / "which").read_text() for path in tmp_path.iterdir()}
    assert kept == {
        ".epoch_0001.damaged": "0", ".epoch_0001.damaged_2": "1", ".epoch_0001.damaged_3": "2",
    }  # fmt: skip
    recover_folders(tmp_path)
    assert names(tmp_path) == kept.keys()
